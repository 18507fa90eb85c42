"""Numbers, shares, times and JSON as a person reads them."""

from datetime import UTC, datetime
from typing import Any

import pytest

from flows.reporting import formats
from flows.reporting.formats import DASH


@pytest.mark.parametrize("word", ["number", "signed", "share", "seconds", "moment", "short", "line"])
def test_none_is_a_dash_and_no_other_value_is(word: str) -> None:
    assert formats.FILTERS[word](None) == DASH
    zero: Any = {"moment": datetime(1970, 1, 1, tzinfo=UTC), "short": "0", "line": "0"}.get(word, 0)
    assert DASH not in formats.FILTERS[word](zero) and "0" in formats.FILTERS[word](zero)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"),
        (0.0, "0"),
        (5.0, "5"),
        (0.12345, "0.123"),
        (-0.12345, "-0.123"),
        (1.23e-05, "1.23e-05"),
        (99.96, "100"),
        (999.4, "999"),
        (999.9, "1\u202f000"),
        (1000.0, "1\u202f000"),
        (1234.5, "1\u202f234"),
        (12345678, "12\u202f345\u202f678"),
        (-12345.6, "-12\u202f346"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        (True, "True"),
        ("NaN", "NaN"),
    ],
)
def test_a_number_is_written_in_few_digits(value: Any, written: str) -> None:
    assert formats.number(value) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0 %"),
        (1, "100 %"),
        (0.5, "50 %"),
        (0.004, "0.4 %"),
        (0.00012, "0.012 %"),
        (0.995, "99.5 %"),
        (0.9999, "99.99 %"),
        (0.99414, "99.4 %"),
        (1.0127, "101.3 %"),
        (1.5, "150 %"),
        (12.0, "1200 %"),
    ],
)
def test_a_share_is_all_only_where_it_is_all(value: float, written: str) -> None:
    assert formats.share(value) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0 ms"),
        (0.25, "250 ms"),
        (0.9999, "1.0 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min 00 s"),
        (3599.7, "1 h 00 min"),
        (7260, "2 h 01 min"),
    ],
)
def test_a_time_is_told_in_the_unit_that_fits(value: float, written: str) -> None:
    assert formats.seconds(value) == written


def test_signs_are_told_and_moments_are_in_universal_time() -> None:
    assert [formats.signed(each) for each in (1, -1, 0, 0.5)] == ["+1", "-1", "0", "+0.5"]
    assert formats.moment("2026-01-02T03:04:05+02:00") == "2026-01-02 01:04:05"


def test_json_is_laid_out_and_what_is_none_stays_as_it_is() -> None:
    deep = "[" * 5000 + "]" * 5000
    assert formats.pretty('{"a": [1]}') == '{\n  "a": [\n    1\n  ]\n}'
    assert formats.pretty("{no json") == "{no json" and formats.pretty(deep) == deep

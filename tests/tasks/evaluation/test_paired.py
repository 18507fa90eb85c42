"""Paired differences: over the same examples only, by hand, and tighter than two intervals where examples differ."""

from typing import Any

import pyarrow as pa
import pytest

from tasks.evaluation.confidence import students
from tasks.evaluation.stage import Difference, paired_differences
from tests.fixtures.builders import failed, table, trace


def tried(rewards: dict[str, list[float | None]], environment: str = "reverse") -> pa.Table:
    """Return the traces of some examples' attempts; None is one that failed."""
    rows: list[dict[str, Any]] = []
    for example, values in rewards.items():
        for number, reward in enumerate(values):
            make = failed if reward is None else trace
            rows.append(
                make(f"{environment}-{example}-{number}", reward=reward, example_id=example, environment=environment)
            )
    return table("traces", rows)


def test_a_difference_by_hand() -> None:
    before = tried({"a": [0.0, 0.5], "b": [1.0], "c": [0.25], "only": [1.0]})
    after = tried({"a": [0.75], "b": [1.0, 1.0], "c": [None], "new": [0.0]})
    average, passed = paired_differences(before, after)
    assert average == Difference("reverse", "avg", 0.625, 0.875, 0.25, students([0.5, 0.0]), 2)
    assert (passed.figure, passed.before, passed.after, passed.difference) == ("pass@1", 0.5, 0.5, 0.0)
    assert passed.interval is None, "no example differs: that says nothing of how far others would"


def test_the_same_shift_of_examples_that_differ_is_seen() -> None:
    hard = [number / 10 for number in range(10)]
    before = tried({f"e{n}": [value] for n, value in enumerate(hard)})
    after = tried({f"e{n}": [value + 0.1 + 0.001 * (-1) ** n] for n, value in enumerate(hard)})
    (found,) = paired_differences(before, after, pass_at=())
    assert found.interval is not None and found.difference == pytest.approx(0.1)
    assert 0.09 < found.interval.low < found.interval.high < 0.11
    alone = students(hard)
    assert alone is not None and alone.high - alone.low > 0.4, "either alone is far less certain"


def test_environments_that_only_one_of_two_has_are_left_out() -> None:
    assert paired_differences(tried({"a": [1.0]}), tried({"a": [1.0]}, "other")) == []


def test_no_example_in_common_is_no_difference_of_zero() -> None:
    (found,) = paired_differences(tried({"a": [1.0]}), tried({"b": [1.0]}), pass_at=())
    assert found == Difference("reverse", "avg", None, None, None, None, 0)

"""Numbers, shares, times and JSON as a person reads them; texts in which nothing acts or hides any more."""

import unicodedata
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.reporting import formats
from flows.reporting.formats import DASH, cut, error_words, one_line, visible


@pytest.mark.parametrize("word", ["number", "with_sign", "share", "seconds", "moment", "short", "line"])
def test_none_is_a_dash_and_no_other_value_is(word):
    assert formats.FILTERS[word](None) == DASH
    zero = {"moment": datetime(1970, 1, 1, tzinfo=UTC), "short": "0", "line": "0"}.get(word, 0)
    assert DASH not in formats.FILTERS[word](zero) and "0" in formats.FILTERS[word](zero)


NUMBERS = {
    "number": {
        **{0: "0", 5.0: "5", 0.12345: "0.123", -0.12345: "-0.123", 1.23e-05: "1.23e-05", 99.96: "100", 999.4: "999"},
        **{999.9: "1,000", 1000.0: "1,000", 1234.5: "1,234", 12345678: "12,345,678"},
        **{-12345.6: "-12,346", float("inf"): "inf", float("nan"): "nan", "NaN": "NaN"},
    },
    "count": {9999: "9,999", 12345: "12,345", 999_999: "999,999", 1_234_567: "1.23 M", 2_345_678_901: "2.35 G"},
    "share": {  # all only where it is all
        **{0: "0 %", 1: "100 %", 0.5: "50 %", 0.004: "0.4 %", 0.00012: "0.012 %", 0.995: "99.5 %", 1.5: "150 %"},
        **{0.9999: "99.99 %", 0.99414: "99.4 %", 1.0127: "101 %", 12.0: "1,200 %"},
    },
    "seconds": {
        **{0: "0 ms", 0.25: "250 ms", 0.9999: "1.0 s", 59.94: "59.9 s", 59.97: "1 min 00 s"},
        **{3599.7: "1 h 00 min", 7260: "2 h 01 min"},
    },
    "with_sign": {1: "+1", -1: "-1", 0: "0", 0.5: "+0.5"},
}


@pytest.mark.parametrize("word", NUMBERS)
def test_numbers_are_written_in_few_digits_and_the_unit_that_fits(word):
    assert {value: formats.FILTERS[word](value) for value in NUMBERS[word]} == NUMBERS[word]
    assert formats.number(True) == "True"


def test_moments_are_in_universal_time():
    assert formats.moment("2026-01-02T03:04:05+02:00") == "2026-01-02 01:04:05"


def test_json_is_laid_out_and_what_is_none_stays_as_it_is():
    assert formats.pretty('{"a": [1]}') == '{\n  "a": [\n    1\n  ]\n}'
    assert formats.pretty("{no json") == "{no json"
    deep = ["[" * depth + "]" * depth for depth in (100, 500_000)]
    assert [formats.pretty(each) == each for each in deep] == [False, True]


FAMILY = "👩\u200d👩\u200d👧"
TEXTS = st.text(
    st.one_of(
        st.sampled_from("a<&\n\t\r\x1b\x9b\u202e\u200d\ufe0f\ufe0e\u0301\u20e3☀👩🏽⟨⟩1\ud83d\ude00\ufdd0\U000e0041"),
        st.characters(),
        st.characters(categories=["Cc", "Cf", "Cs", "Mn", "Me", "Zl", "Zp"]),
    )
)
DRAWN_FORMATS = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
"""Signs of numbers and verses: characters of format that have a shape."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "␛[31mred"),
        ("\x1b]8;;http://x\x07y", "␛]8;;http://x␇y"),
        ("\x9b31m", "⟨U+009B⟩31m"),
        ("a\r\nb\rc", "a␍\nb␍c"),
        ("\0\x7f", "␀␡"),
        ("user\u202egnp.exe", "user⟨U+202E⟩gnp.exe"),
        ("\u200e\u200f\u061c\u2066", "⟨U+200E⟩⟨U+200F⟩⟨U+061C⟩⟨U+2066⟩"),
        ("a\u200bb\ufeff", "a⟨U+200B⟩b⟨U+FEFF⟩"),
        ("a\u2028b\u2029", "a⟨U+2028⟩b⟨U+2029⟩"),
        ("\ud800 \ude00", "⟨U+D800⟩ ⟨U+DE00⟩"),
        ("\uffff\U0010ffff\ufdd0", "⟨U+FFFF⟩⟨U+10FFFF⟩⟨U+FDD0⟩"),
        ("x\U000e0041", "x⟨U+E0041⟩"),
        ("soft\xadhyphen", "soft⟨U+00AD⟩hyphen"),
        # Joiners and selectors stay in emoji alone.
        ("a\u200db", "a⟨U+200D⟩b"),
        ("👩\u200d\u200d👧", "👩⟨U+200D⟩⟨U+200D⟩👧"),
        ("👩\u200d", "👩⟨U+200D⟩"),
        ("a\ufe0f ❤\ufe0f\ufe0f", "a⟨U+FE0F⟩ ❤\ufe0f⟨U+FE0F⟩"),
    ],
)
def test_what_acts_or_hides_is_shown(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain <b>text</b> & more\n\tnext",
        "naïve Größe Ελλάς Привет עִבְרִית مَرْحَبًا हिन्दी ไทย བོད 한국어 日本語 𐍈",
        f"🙂 👍🏽 {FAMILY} ❤\ufe0f ☀\ufe0e 1\ufe0f\u20e3 🇬🇧 🏳\ufe0f\u200d🌈",
        "a\xa0b\u2003c",
    ],
)
def test_harmless_text_stays(text):
    assert visible(text) is text


@given(TEXTS)
def test_nothing_acts_or_hides_in_what_comes_out(text):
    shown = visible(text)
    shown.encode()  # a lone surrogate would refuse
    for place, each in enumerate(shown):
        category, number = unicodedata.category(each), ord(each)
        assert category not in ("Cc", "Cs", "Zl", "Zp") or each in "\n\t"
        assert category != "Cf" or number in DRAWN_FORMATS or (each == "\u200d" and place > 0)
        assert unicodedata.bidirectional(each) not in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        assert not 0xFDD0 <= number <= 0xFDEF and number & 0xFFFE != 0xFFFE
    assert shown.count("\n") == text.count("\n")
    assert visible(shown) == shown


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"], exclude_characters="\u115f\u1160\u3164\uffa0")))
def test_letters_and_signs_of_all_scripts_stay(text):
    assert visible(text) == text


@given(TEXTS, st.integers(0, 40))
def test_a_cut_is_a_head_and_counts_the_rest(text, most):
    head, left_out = cut(text, most)
    assert text.startswith(head)
    assert len(head) + left_out == len(text)
    assert len(head) <= most
    assert left_out == 0 or len(head) == most
    assert left_out > 0 or head == text


@given(TEXTS, st.integers(1, 40))
def test_one_line_is_one_line_of_its_width(text, most):
    line = one_line(text, most)
    assert len(line) <= most
    assert len(line.splitlines()) <= 1
    assert line == visible(line)
    assert line.endswith("…") or len(visible(text)) <= most
    words = error_words(text, max(most, 6))
    assert len(words) <= max(most, 6) and not set(words) & set("\n\r\t\x1b")


def test_one_line_draws_what_it_leaves_out():
    assert one_line("a\n\tb", 10) == "a⏎⇥b"
    assert one_line("abcdef", 6) == "abcdef"
    assert one_line("abcdefg", 6) == "abcde…"
    assert one_line("\x1b" * 3 + "\x9b", 6) == "␛␛␛⟨U…"


def test_of_an_error_what_was_raised_and_the_advice_at_its_end_stay():
    frames = "".join(f'  File "x.py", line {number}, in call\n    step({number})\n    ^^^^\n' for number in range(30))
    trace = f"Traceback (most recent call last):\n{frames}"
    said = (
        f"the agent failed:\n{trace}KeyError: 'answer'\n\nDuring handling:\n\n{trace}ValueError: no 'answer'; do this"
    )
    assert (
        error_words(said, 200)
        == "the agent failed:⏎KeyError: 'answer'⏎⏎During handling:⏎⏎ValueError: no 'answer'; do this"
    )
    long = error_words(f"it failed: {'x' * 5000}; unset HF_HUB_OFFLINE", 100)
    assert long.startswith("it failed: x") and "x… x" in long and long.endswith("x; unset HF_HUB_OFFLINE")
    group = (
        f"  + Exception Group Traceback (most recent call last):\n  | File\n  | ExceptionGroup: two\n{trace}KeyError: 1"
    )
    assert "ExceptionGroup: two" in error_words(group, 500)

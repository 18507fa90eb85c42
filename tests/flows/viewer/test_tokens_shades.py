"""Shades of tokens: which letter a number gets, at the borders too, and the legends that name them."""

import math

import polars as pl
import pytest

from flows.queries.shown_tokens import COLOURINGS, NONE, default_colouring, drawn_text, largest, plain_number
from flows.queries.tokens import TOKENS
from flows.viewer.terminal.trace_body import MEASURES

BY_NAME = {each.name: each for each in COLOURINGS}


def shades(name: str, values: list[float | None] | list[bool | None], size: float = 0.0) -> str:
    """The letters of a column's values, the column that a colouring looks at."""
    column = "log_ratio" if name == "ratio" else BY_NAME[name].column
    frame = pl.DataFrame({column: values}, schema={column: TOKENS[column]})
    return BY_NAME[name].shades(frame, size)


def test_shades_around_zero_are_measured_by_the_largest() -> None:
    values = [None, -1.0, -0.75, -0.5, -0.25, -1e-9, 0.0, 1e-9, 0.25, 0.26, 0.5, 1.0, 7.0]
    assert shades("advantage", values, size=1.0) == "-abcddoeeffhh"
    assert shades("advantage", [0.0, 0.0]) == "oo", "a largest size of zero divides nothing"


def test_the_importance_ratio_is_shaded_around_one() -> None:
    values = [None, 0.0, 0.0005, -0.0005, 0.001, -0.01, 0.1, -0.1, 0.5, -0.5, math.inf, -math.inf]
    assert shades("ratio", values) == "-ooo" + "ec" + "gb" + "ha" + "ha"


@pytest.mark.parametrize(
    ("name", "values", "letters"),
    [
        ("mismatch", [None, 0.0, 1e-8, 9e-7, 1e-6, 0.05, 0.1, math.inf], "-ABBCGHH"),
        ("entropy", [None, 0.0, 0.0101, 0.31, 3.9, 4.0], "-ABDGH"),
    ],
)
def test_shades_that_rise_begin_at_their_edge(name: str, values: list[float | None], letters: str) -> None:
    assert shades(name, values) == letters


def test_log_probs_are_deeper_the_less_likely_a_token_was() -> None:
    values = [None, *(math.log(chance) for chance in (1.0, 0.995, 0.95, 0.6, 0.3, 0.05, 0.001))]
    assert shades("engine", values) == shades("learner", values) == "-AABDEGH"


def test_flags_and_the_mask_have_letters_of_their_own() -> None:
    assert shades("outside", [True, False, None]) == "xi-"
    assert shades("trained", [True, False]) == "yn"
    given = {"sampled": [True, False, False, False], "is_content": [None, True, False, None]}
    assert BY_NAME["mask"].shades(pl.DataFrame(given), 0.0) == "sptu"


def test_every_shade_that_can_be_is_in_its_legend() -> None:
    for each in COLOURINGS:
        letters = [letter for letter, _ in each.legend(2.0)]
        assert len(set(letters)) == len(letters) and NONE not in letters
    assert BY_NAME["advantage"].legend(2.0)[0] == ("a", "-2") and BY_NAME["advantage"].legend(2.0)[-1] == ("h", "+2")
    assert [label for _, label in BY_NAME["ratio"].legend(0.0)][3:6] == ["< 0.999", "1", "> 1.001"]


def test_what_is_looked_at_first_is_what_there_is() -> None:
    def tokens(**columns: list[float | None]) -> pl.DataFrame:
        names = ("rl_weight", "ce_weight", "engine_logprob")
        return pl.DataFrame(
            {name: columns.get(name, [None]) for name in names}, schema=dict.fromkeys(names, pl.Float32)
        )

    assert default_colouring(tokens(rl_weight=[1.0], ce_weight=[1.0])) == "advantage"
    assert default_colouring(tokens(rl_weight=[0.0], ce_weight=[1.0])) == "ce_weight"
    assert default_colouring(tokens(engine_logprob=[-1.0])) == "engine"
    assert default_colouring(tokens()) == "mask" and largest(tokens(), "rl_weight") == 0.0


def test_blanks_of_tokens_can_be_seen() -> None:
    assert drawn_text(" the  end ", 1) == "·the··end·"
    assert drawn_text("two words", 1) == "two words"
    assert drawn_text("a\n\tb", 1) == "a⏎\n⇥b"
    assert drawn_text("", 1) == "∅" and drawn_text(None, 12) == "⟨12⟩"


def test_numbers_are_plain_json() -> None:
    assert plain_number(0.123456789012) == 0.123456789 and plain_number(math.inf) == "Infinity"
    assert plain_number(-math.inf) == "-Infinity" and plain_number(math.nan) == "NaN"
    assert plain_number(None) is None and plain_number(True) is True and plain_number(7) == 7


def test_the_terminal_has_the_colourings_of_the_page_by_the_same_names() -> None:
    assert set(MEASURES) - {"weight"} == {each.name for each in COLOURINGS}

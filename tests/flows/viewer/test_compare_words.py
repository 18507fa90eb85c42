"""Word by word: what two texts have in common, and that nothing of them is lost or made up."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.queries.compare_traces import LONGEST, MOST_WORDS, compared_words

WORDS = st.lists(st.sampled_from(["a", "b", "the", " ", "\n", "<rev>", "é", "💥", "\u202e", "1_000"]), max_size=40)


def told(pieces: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(piece["kind"], piece["text"]) for piece in pieces]


def test_words_of_one_alone_are_told_and_the_rest_is_the_same() -> None:
    a, b = compared_words("the answer is 54, I think", "the answer is 57, I am sure")
    assert told(a) == [("same", "the answer is "), ("own", "54"), ("same", ", I "), ("own", "think")]
    assert told(b) == [("same", "the answer is "), ("own", "57"), ("same", ", I "), ("own", "am sure")]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("", "", ([], [])),
        ("x", "", ([("own", "x")], [])),
        ("x y", "x y", ([("same", "x y")], [("same", "x y")])),
        ("x x", "x x x", ([("same", "x x")], [("same", "x x"), ("own", " x")])),
    ],
)
def test_texts_that_are_empty_or_alike(a: str, b: str, expected: Any) -> None:
    assert tuple(told(each) for each in compared_words(a, b)) == expected


@settings(max_examples=50)
@given(WORDS, WORDS)
def test_pieces_are_the_texts_again_and_what_is_the_same_is_so_in_both(one: list[str], other: list[str]) -> None:
    texts = "".join(one), "".join(other)
    found = compared_words(*texts)
    assert tuple("".join(piece["text"] for piece in pieces) for pieces in found) == texts
    same = ["".join(piece["text"] for piece in pieces if piece["kind"] == "same") for pieces in found]
    assert same[0] == same[1]
    assert (texts[0] == texts[1]) == all(piece["kind"] == "same" for pieces in found for piece in pieces)


def test_long_texts_are_cut_and_only_so_many_words_are_compared() -> None:
    one, other = " ".join(f"w{n}" for n in range(3_000)), " ".join(f"v{n}" for n in range(3_000))
    a, _ = compared_words(one, other)
    assert [piece["kind"] for piece in a][-1] == "apart" and sum(len(piece["text"]) for piece in a) <= LONGEST
    compared = "".join(piece["text"] for piece in a if piece["kind"] != "apart")
    assert len(compared.replace(" ", " \n").split("\n")) <= MOST_WORDS
    (whole,), _ = compared_words("x" * 10_000_000, "y" * 10_000_000)
    assert len(whole["text"]) <= LONGEST

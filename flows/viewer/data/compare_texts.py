"""Two attempts as texts next to each other: what both were given, and what each said, turn by turn."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import polars as pl

from flows.viewer.data.compare_words import compared_words, shown_of
from flows.viewer.data.images import Images
from flows.viewer.data.messages import branches, messages
from flows.viewer.data.messages_read import read_message
from flows.viewer.data.trace import Found
from flows.viewer.library import Library

MOST_TURNS = 30
"""Turns that are laid side by side."""
Turn = tuple[list[dict[str, str]], str | None]
"""What came before a sampled message (role and text), and its text; None where nothing was sampled after it."""


def turns(library: Library, found: Found) -> list[Turn]:
    """Return the turns of a trace along its last way from a root to a leaf."""
    rows = messages(library, found)
    ways = branches(rows)
    way = rows.filter(pl.col("message").is_in(ways[-1])).sort("message") if ways else rows
    given: list[dict[str, str]] = []
    done: list[Turn] = []
    for row in way.iter_rows(named=True):
        if row["sampled"]:
            done.append((given, _text(row)))
            given = []
        else:
            given.append({"role": row["role"], "text": _text(row)})
    return [*done, (given, None)] if given else done


def side_by_side(one: Sequence[Turn], other: Sequence[Turn]) -> dict[str, Any]:
    """Return the turns of two attempts, pair by pair, what was said as pieces of words; see `compared_words`.

    `turns` have `same_given`, `given_a`, `given_b`, `said_a` and `said_b`, None where an attempt has no such turn;
    `num_turns` are all, of which at most MOST_TURNS are here.
    """
    pairs = list(zip_longest(one, other))
    return {"turns": [_pair(*each) for each in pairs[:MOST_TURNS]], "num_turns": len(pairs)}


def _pair(one: Turn | None, other: Turn | None) -> dict[str, Any]:
    texts = [None if turn is None else turn[1] for turn in (one, other)]
    said: list[Any] = list(compared_words(texts[0] or "", texts[1] or ""))
    given = [None if turn is None else turn[0] for turn in (one, other)]
    return {
        "same_given": given[0] == given[1],
        **{f"given_{side}": _given(own) for side, own in zip("ab", given, strict=True)},
        **{
            f"said_{side}": None if text is None else {"pieces": pieces, "left_out": shown_of(text)["left_out"]}
            for side, text, pieces in zip("ab", texts, said, strict=True)
        },
    }


def _given(own: Sequence[dict[str, str]] | None) -> list[dict[str, Any]] | None:
    return None if own is None else [{"role": each["role"], **shown_of(each["text"])} for each in own]


def _text(row: dict[str, Any]) -> str:
    """Return all that a message says as one text: thoughts, parts, calls of tools; an image by its name alone."""
    read = read_message(row, Images(()))
    said = [f"(thoughts)\n{read['thoughts']['text']}"] if read["thoughts"] else []
    said += ["(image)" if each["kind"] == "image" else each["text"]["text"] for each in read["parts"]]
    said += [f"(call) {each['name'] or ''} {each['arguments']['text']}" for each in read["calls"]]
    return "\n".join(said)

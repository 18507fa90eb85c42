"""One row of a packed batch: its samples in order, what each weighs, and its tokens as the learner was given them."""

from itertools import accumulate
from typing import Any

import polars as pl

from flows.viewer import addresses
from flows.viewer.data import batch, batch_row
from flows.viewer.data.batch_texts import texts
from flows.viewer.data.retired import lost
from flows.viewer.drawing.levels import diverging, sequential
from flows.viewer.library import Library
from flows.viewer.page import Asked, BadQuestion, Crumb, NotThere, Page
from flows.viewer.pages.batch import DENOMINATORS, crumbs, drawn_rows, may_change, neighbours, overview, trace_of

COLOURS = ("advantage", "logprob", "component")
"""By what tokens are coloured."""
MOST_TOKENS = 2000
"""Tokens that are drawn at once; of a sample that has more, the first. The page of its trace has all."""
LEAST_LOGPROB = -4.0
"""What is as improbable as this, or more, has the faintest colour: exp(-4) is 2 in 100."""
COMPONENTS = {"rl_weights": "rl", "ce_weights": "ce", "ref_kl_weights": "ref_kl"}


def page(library: Library, asked: Asked) -> Page:
    """Return a row. Raises NotThere where the step has no batch or the batch no such row."""
    run, step, number = asked.path["run"], asked.place("step"), asked.place("row")
    of = batch.packed(library, run, step)
    rows = batch.rows(library, of)
    own = rows.filter(pl.col("row") == number)
    if own.is_empty():
        why = "its rows were dropped for their age" if lost(library, [of.batches], "batches") else f"no row {number}"
        raise NotThere(f"the batch of step {step} of run {run!r} has {len(rows)} rows, numbered from 0; {why}")
    whole = overview(library, of)
    values = {
        "run": run,
        "step": step,
        "row": drawn_rows(library, of, own)[0] | {name: own[name][0] for name in DENOMINATORS},
        "samples": _samples(library, of, number),
        "colour": asked.one_of("colour", COLOURS, "component" if whole["largest"] is None else "advantage"),
        "colours": COLOURS,
        **{name: whole[name] for name in ("state", "policy", "key", "capacity", "largest", "rewards", "environments")},
        "retired": whole["retired"],
        "drawn": _drawn(library, of, number, asked, whole["largest"]),
        "command": f"stagecoach lineage {run}:{step}:{number}",
        **neighbours(rows["row"].to_list(), number),
    }
    way = (*crumbs(run, step), Crumb("batch", addresses.batch(run, step)))
    return Page("row.html", f"Row {number}", values, way, may_change(library, of))


def _samples(library: Library, of: batch.Packed, number: int) -> list[dict[str, Any]]:
    found = batch_row.row_samples(library, of, number).to_dicts()
    return [each | {"address": trace_of(of.run, each)} for each in found]


def _drawn(library: Library, of: batch.Packed, number: int, asked: Asked, largest: float | None) -> dict[str, Any]:
    """Return the tokens of the samples from `first` on, as many samples as MOST_TOKENS hold."""
    samples = batch_row.row_samples(library, of, number)
    if samples.is_empty():
        return {"first": 0, "last": None, "before": None, "after": None, "samples": []}
    first = asked.number("first", 0)
    if first >= len(samples):
        raise BadQuestion(f"first={first}: the row has the samples 0 to {len(samples) - 1}")
    lengths = samples["num_tokens"].to_list()
    shown = _fitting(lengths[first:])
    chosen = samples.slice(first, shown)
    tokens = batch_row.tokens(library, of, number)
    pieces = []
    for place in chosen["place"]:
        own = tokens.filter(pl.col("place") == place)
        drawn = _tokens(library, of, own.head(MOST_TOKENS), largest)
        pieces.append({"place": place, "tokens": drawn, "left_out": len(own) - len(drawn)})
    return {
        "first": first,
        "last": first + shown - 1,
        "before": max(first - _fitting(lengths[:first][::-1]), 0) if first else None,
        "after": first + shown if first + shown < len(samples) else None,
        "samples": pieces,
    }


def _fitting(lengths: list[int]) -> int:
    """Return how many of the samples, in order, have at most MOST_TOKENS together; at least the first."""
    return max(1, sum(total <= MOST_TOKENS for total in accumulate(lengths)))


def _tokens(library: Library, of: batch.Packed, tokens: pl.DataFrame, largest: float | None) -> list[dict[str, Any]]:
    """Return the tokens of one sample with their texts and the steps of colour of each."""
    told = texts(library, of.run, tokens["token_id"].to_list())
    return [_token(row, text, largest) for row, text in zip(tokens.drop("place").to_dicts(), told, strict=True)]


def _token(row: dict[str, Any], text: tuple[str, bool], largest: float | None) -> dict[str, Any]:
    components = [name for column, name in COMPONENTS.items() if row[column]]
    # Zero where it was not sampled; of a token that counts in rl, which was sampled, that it was certain.
    sampled = row["logprob"] != 0 or row["rl_weights"] != 0
    return {
        **row,
        "advantage": row["advantage"] if row["rl_weights"] else None,
        "logprob": row["logprob"] if sampled else None,
        "text": text[0],
        "special": text[1],
        "levels": {
            "adv": diverging(row["advantage"] if row["rl_weights"] else None, largest),
            "lp": sequential(row["logprob"], LEAST_LOGPROB, 0.0) if sampled else "none",
            "com": components[0] if len(components) == 1 else "several" if components else "none",
        },
    }

"""Searches all rollouts of a run: which meet a condition, in which steps, and the text around a match."""

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from threading import Event
from typing import Any

import polars as pl
from polars.exceptions import ComputeError

from flows.queries.conditions import Condition, Pattern, matching_rows
from flows.queries.rollouts import rollout_columns
from flows.queries.store_reader import StoreReader
from storage.read.views import quote, select

AROUND = 140
"""Characters on each side of a match that are shown, at most."""
SHOWN = ("reward", "advantage", "outcome", "detail", "length", "environment", "example_id")
"""Columns of a hit that are returned beside its text."""
_COUNTS = """
select for_training, step, count(*)::bigint as num_rollouts, count(hits.key)::bigint as num_hits
from rollouts
left join hits using (key, trace_id)
group by for_training, step
order by for_training desc, step
"""


@dataclass(frozen=True)
class Hits:
    """The rollouts of a run that meet a condition."""

    rows: pl.DataFrame
    """By step and in recorded order: run, step, for_training, trace_id, key, and what the condition speaks of."""
    counts: pl.DataFrame
    """For each step, evaluations behind steps of training: step, for_training, num_rollouts, num_hits."""

    @property
    def first_step(self) -> int | None:
        """The first step of training with a hit."""
        steps = self.counts.filter("for_training", pl.col("num_hits") > 0)["step"]
        return None if steps.is_empty() else int(steps[0])


def run_rollouts(
    reader: StoreReader, run: str, columns: Collection[str], keys: Collection[str] | None = None
) -> pl.DataFrame:
    """Return some columns of all rollouts of a run, or of those that some work made; what was read is held.

    Raises NotThere for an unknown run.
    """
    lineages = [one for one in reader.history(run).lineages if keys is None or one.traces.key in keys]
    return rollout_columns(reader, run, lineages, columns)


def search_run(reader: StoreReader, run: str, condition: Condition, reader_gone: Event | None = None) -> Hits:
    """Return the rollouts of a run that meet a condition, and how many of each step do.

    They are those that `stagecoach quarantine --run RUN --where` marks. Raises NotThere and BadCondition, which ends
    the search once `reader_gone` is set.
    """
    rows = run_rollouts(reader, run, {"run", "step", "for_training", "trace_id", "key"} | condition.columns)
    hits = matching_rows(rows, condition, reader_gone)
    names = ["key", "trace_id", "step", "for_training"]
    frames = {"rollouts": lambda: rows.select(names), "hits": lambda: hits.select(names[:2])}
    return Hits(hits, select(frames, _COUNTS))


def filter_traces(reader: StoreReader, run: str, frame: pl.DataFrame, where: str) -> pl.DataFrame:
    """Return the traces of a frame, as `rollouts.traces_of` has it, that meet a condition. Raises BadCondition."""
    condition, by = Condition(where), ["key", "trace_id"]
    rows = run_rollouts(reader, run, {*by, *condition.columns}, set(frame["key"]))
    return frame.join(matching_rows(rows, condition), on=by, how="semi", maintain_order="left")


def describe_hits(reader: StoreReader, run: str, hits: pl.DataFrame, condition: Condition) -> list[dict[str, Any]]:
    """Return some hits with their outcomes and the text around a match; see `text_around`.

    Where nothing was searched for in a text, it is the beginning of the reply.
    """
    names, patterns = ["key", "trace_id"], condition.patterns or (Pattern("reply", ""),)
    # What the condition speaks of has been read.
    missing = {*SHOWN, *(pattern.column for pattern in patterns)} - set(hits.columns)
    more = run_rollouts(reader, run, {*names, *missing}, set(hits["key"]))
    rows = hits.join(more, on=names, how="left", maintain_order="left").to_dicts()
    return [
        {name: row[name] for name in ("trace_id", "key", "step", "for_training", *SHOWN)}
        | {"piece": text_around(row, patterns)}
        for row in rows
    ]


def text_around(row: dict[str, Any], patterns: Collection[Pattern]) -> dict[str, str]:
    """Return the text around the first match of a pattern: column, before, match and after.

    Without a match, as of a condition with `or`, the begin of the first pattern's column is before it.
    """
    for pattern in patterns:
        around = f"(?s)(?P<before>.{{0,{AROUND}}}?)(?P<match>(?-s){pattern.regex})(?s)(?P<after>.{{0,{AROUND}}})"
        try:  # polars' expressions take time linear in the text, as the database's do
            parts = pl.Series([row[pattern.column] or ""]).str.extract_groups(around)[0]
        except ComputeError:  # polars does not know all of RE2: then nothing is marked
            continue
        if parts["match"]:
            return {"column": pattern.column, **{name: parts[name] for name in ("before", "match", "after")}}
    column = next(iter(patterns)).column
    return {"column": column, "before": (row[column] or "")[: 2 * AROUND], "match": "", "after": ""}


def commands(run: str, condition: Condition, store: str) -> dict[str, str]:
    """Return what is typed in a terminal to work with the same rollouts, by command."""
    where = f"from {quote(run)}.rollouts where ({condition.text})"
    to_file = ("--format", "verifiers", "--to", "hits.jsonl")
    typed = {
        "quarantine": ["quarantine", "--run", run, "--where", condition.text, "--reason", "found by search"],
        "traces": ["traces", run, "--where", condition.text],
        "sql": ["sql", f"select step, trace_id, reward, reply {where} order by step"],
        "export": ["export", run, "--where", condition.text, "--quarantined", *to_file],
    }
    return {name: shlex.join(["stagecoach", *words, "--store", store]) for name, words in typed.items()}

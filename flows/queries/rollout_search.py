"""Searches all rollouts of a run: which meet a condition, in which steps, and the piece of text that was looked for."""

import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from threading import Event
from typing import Any

import polars as pl
from polars.exceptions import ComputeError

from flows.queries.conditions import Condition, Pattern, condition_of, matching_rows
from flows.queries.rollouts import rollout_columns
from flows.queries.store_reader import StoreReader
from flows.queries.views import select
from storage.read.lineage import row_identities

AROUND = 140
"""Characters beside what was looked for, at most: as far as its sentence goes."""
BESIDE = 40
"""Characters that are shown on each side, where there are so many, even if its sentence has fewer."""
SHOWN = ("reward", "advantage", "outcome", "detail", "length", "environment", "example_id")
"""Columns of a hit that are returned beside its text."""
_ENDS = re.compile(r"[.!?]\s+|\n")


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


SEARCHED = ("trace_id", "group_id", "example_id", "assignment_id", "error_type", "error_message")
"""Columns of a trace in which a plain text is looked for, beside its messages."""
_HOLDING = "select distinct key, trace_id, true as holds from message_texts where regexp_matches(texts, $pattern)"


def search_mask(reader: StoreReader, run: str, frame: pl.DataFrame, text: str) -> pl.Series | None:
    """Return for each row of a frame of traces whether it holds a text; None where the text is empty.

    Upper and lower case are alike, in all scripts, letter by letter; nothing in the text has a meaning of its own.
    """
    if not text:
        return None
    # Half a letter, as a terminal may hand it over, is no text that polars takes.
    pattern = "(?i)" + pl.escape_regex(text.encode("utf-8", "replace").decode())
    keys = set(frame["key"])
    lineages = [one for one in reader.history(run).lineages if one.traces.key in keys]
    name = ("search", text, row_identities(one.traces for one in lineages))
    # Of all texts the ids alone are held.
    holding = reader.cache.once(name, lambda: select(reader.frames(run), lineages, _HOLDING, pattern=pattern))
    joined = frame.join(holding, on=["key", "trace_id"], how="left", maintain_order="left")
    itself = pl.any_horizontal(pl.col(SEARCHED).str.contains(pattern).fill_null(False))
    return joined.select(found=itself | pl.col("holds").fill_null(False))["found"]


def search_run(reader: StoreReader, run: str, condition: Condition, reader_gone: Event | None = None) -> Hits:
    """Return the rollouts of a run that meet a condition, and how many of each step do.

    They are those that `stagecoach quarantine --run RUN --where` marks. Raises NotThere and BadCondition, which ends
    the search once `reader_gone` is set.
    """
    always = {"run", "step", "for_training", "trace_id", "key"}
    rows = run_rollouts(reader, run, always | condition.columns)
    hits = matching_rows(rows, condition, reader_gone)
    by = ["for_training", "step"]
    found = hits.group_by(by).agg(num_hits=pl.len().cast(pl.Int64))
    counts = rows.group_by(by, maintain_order=True).agg(num_rollouts=pl.len().cast(pl.Int64))
    counts = counts.join(found, on=by, how="left", maintain_order="left")
    return Hits(hits, counts.with_columns(pl.col("num_hits").fill_null(0)))


def filter_traces(reader: StoreReader, run: str, frame: pl.DataFrame, where: str) -> pl.DataFrame:
    """Return the traces of a frame, as `rollouts.traces` has it, that meet a condition. Raises BadCondition."""
    condition, by = condition_of(where), ["key", "trace_id"]
    rows = run_rollouts(reader, run, {*by, *condition.columns}, set(frame["key"]))
    return frame.join(matching_rows(rows, condition), on=by, how="semi", maintain_order="left")


def describe_hits(reader: StoreReader, run: str, hits: pl.DataFrame, condition: Condition) -> list[dict[str, Any]]:
    """Return some hits with their outcomes and the sentence around what was looked for; see `text_around`.

    Where nothing was looked for in a text, it is the beginning of the reply.
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
    """Return the text around the first thing that was looked for: column, before, match and after, the last two empty
    where it is not in the text (of a condition with `or`, or a `not`)."""
    for pattern in patterns:
        text = row[pattern.column] or ""
        if (place := _place(text, pattern)) is not None:
            begin, end = place
            before, after = text[max(0, begin - AROUND) : begin], text[end : end + AROUND]
            # To the borders of its sentence where they are near, so that it can be read.
            starts = [found.end() for found in _ENDS.finditer(before) if len(before) - found.end() >= BESIDE]
            stop = _ENDS.search(after, BESIDE)
            before = before[starts[-1] :] if starts else ("…" if begin > AROUND else "") + before
            after = after[: stop.end()].rstrip() if stop else after + ("…" if len(text) > end + AROUND else "")
            return {"column": pattern.column, "before": before, "match": text[begin:end], "after": after}
    first = next(iter(patterns))
    text = row[first.column] or ""
    cut = text[: 2 * AROUND] + ("…" if len(text) > 2 * AROUND else "")
    return {"column": first.column, "before": cut, "match": "", "after": ""}


def _place(text: str, pattern: Pattern) -> tuple[int, int] | None:
    """Return where a text first matches, in characters; None where it does not."""
    # Polars' expressions take time linear in the text, as the database's do.
    column = pl.Series([text])
    try:
        start, match = column.str.find(pattern.regex)[0], column.str.extract(f"({pattern.regex})", 1)[0]
    except ComputeError:  # Polars does not know all of RE2: then nothing is marked
        return None
    if not pattern.regex or start is None or match is None:
        return None
    begin = len(text.encode()[:start].decode())
    return begin, begin + len(match)


def commands(run: str, condition: Condition, store: str) -> dict[str, str]:
    """Return what is typed in a terminal to work with the same rollouts, by command."""
    table = '"' + run.replace('"', '""') + '".rollouts'
    reason = f"found by search: {condition.text}"
    listed = f"select step, trace_id, reward, reply from {table} where ({condition.sql}) order by step"
    typed = {
        "quarantine": ["quarantine", "--run", run, "--where", condition.text, "--reason", reason],
        "traces": ["traces", run, "--where", condition.text],
        "sql": ["sql", listed],
        "export": ["export", run, "--where", condition.sql, "--format", "verifiers", "--to", "rollouts.jsonl"],
    }
    return {name: shlex.join(["stagecoach", *words, "--store", store]) for name, words in typed.items()}

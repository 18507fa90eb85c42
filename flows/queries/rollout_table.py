"""The table `rollouts`: one row for each rollout that a run uses, with its prompt, its reply and its outcome.

Conditions on rollouts speak of its columns (`flows.queries.conditions`). Only what is asked for is read: texts are made
of messages, outcomes of verdicts and batches.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import polars as pl
from polars.io.plugins import register_io_source

from flows.queries.notes import notes_of_rollouts
from flows.queries.outcomes import outcomes_of
from flows.queries.step_history import StepHistory, StepLineage, present
from storage.read.frames import Frames
from storage.schemas.stage_tables import TRACES

ADDED = {
    "run": (pl.String, "the run that uses the rollout; `step` is the step in it"),
    "for_training": (pl.Boolean, "false of rollouts that score a policy, whose step is the policy's version"),
    "length": (pl.Int64, "tokens sampled, as num_output_tokens"),
    "outcome": (pl.String, "trained, filtered, errored, ..."),
    "detail": (pl.String, "the filter or the class of error that decided its outcome"),
    "advantage": (pl.Float64, "reward minus baseline, as the algorithm has it; null without a sample"),
    "baseline": (pl.Float64, "what was subtracted from the reward"),
    "prompt": (pl.String, "contents of the messages that the policy was given, in order, a line break between them"),
    "note": (pl.String, "what people noted on it with `stagecoach note`, a line for each note"),
    "tags": (pl.String, "its tags, a space between them"),
    "reply": (pl.String, "what the policy wrote, in order: thoughts, contents, tool calls as JSON"),
}
"""Columns beside those of traces, each with its type and meaning."""
_STORED = pl.DataFrame(TRACES.stored.empty_table()).schema
SCHEMA: dict[str, Any] = {**_STORED, **{name: kind for name, (kind, _) in ADDED.items()}}
MORE = r'"(tool_calls|reasoning_content)"\s*:\s*["\[{]'
"""What the body of a message holds that says more than its content."""
ROLLOUT = ("key", "trace_id")
"""What names a rollout as one piece of work has it: scored again, it has another key."""
Held = Callable[[str, Callable[[], pl.DataFrame]], pl.DataFrame]
"""Returns what is made, or what is held of it under a name."""


def rollouts(frames: Frames) -> pl.LazyFrame:
    """Return one row for each rollout that a run uses, of all runs of `frames`; columns as in `SCHEMA`."""

    def read(
        columns: list[str] | None, predicate: pl.Expr | None, count: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        found = [each for run in frames.run_names for each in StepHistory(frames.graph, run).lineages]
        rows = rollouts_of(frames, found, columns or list(SCHEMA))
        rows = rows if predicate is None else rows.filter(predicate)
        yield rows if count is None else rows.head(count)

    return register_io_source(read, schema=SCHEMA)


def _not_held(_: str, make: Callable[[], pl.DataFrame]) -> pl.DataFrame:
    return make()


def rollouts_of(
    frames: Frames, found: Sequence[StepLineage], columns: Collection[str], held: Held = _not_held
) -> pl.DataFrame:
    """Return some columns of the rollouts of some lineages, by step and in recorded order; nothing else is read.

    `held` is asked for what takes long to make: it may keep it.
    """
    read = [name for name in _STORED if name != "run" and name in {*columns, *ROLLOUT, "step", "seq"}]
    read += ["length"] if "length" in columns else []
    rows = _runs(found).join(held(f"traces: {', '.join(read)}", lambda: _traces(frames, found, read)), on="key")
    parts: tuple[tuple[str, tuple[str, ...], Callable[[], pl.DataFrame]], ...] = (
        ("outcomes", ("outcome", "detail"), lambda: _outcomes(frames, found)),
        ("samples", ("advantage", "baseline"), lambda: _samples(frames, found)),
        ("notes", ("note", "tags"), lambda: notes_of_rollouts(frames.store)),
        ("prompt", ("prompt",), lambda: _texts(frames, found, "prompt", sampled=False)),
        ("reply", ("reply",), lambda: _texts(frames, found, "reply", sampled=True)),
    )
    for name, own, make in parts:
        if set(own) & set(columns):
            made = make() if name == "notes" else held(name, make)  # notes come and go, and are in memory anyway
            by = [each for each in ("run", *ROLLOUT) if each in made.columns]
            rows = rows.join(made, on=by, how="left", maintain_order="left")
    return rows.sort("for_training", "step", "seq", maintain_order=True, descending=[True, False, False]).select(
        name for name in SCHEMA if name in columns
    )


def _runs(found: Sequence[StepLineage]) -> pl.DataFrame:
    rows = [(each.run, each.traces.key, each.for_training) for each in found]
    return pl.DataFrame(rows, {"run": pl.String, "key": pl.String, "for_training": pl.Boolean}, orient="row")


def _traces(frames: Frames, found: Sequence[StepLineage], names: Sequence[str]) -> pl.DataFrame:
    rows = frames.rows(present(*(each.traces for each in found)), "traces")
    return rows.select(
        pl.col("num_output_tokens").alias(name) if name == "length" else name for name in names
    ).collect()


def _outcomes(frames: Frames, found: Sequence[StepLineage]) -> pl.DataFrame:
    return outcomes_of(frames, found).select("run", *ROLLOUT, "outcome", "detail").unique(["run", *ROLLOUT])


def _samples(frames: Frames, found: Sequence[StepLineage]) -> pl.DataFrame:
    """Return what the samples of each rollout say of it, which all of them say alike."""
    made = [(each.run, each.traces.key, each.samples.key) for each in found if each.samples]
    keys = pl.DataFrame(made, dict.fromkeys(("run", "key", "of"), pl.String), orient="row")
    read = frames.rows(present(*(each.samples for each in found)), "samples")
    rows = read.select("trace_id", "advantage", "baseline", of="key").collect()
    each = rows.group_by("of", "trace_id").agg(pl.col("advantage", "baseline").drop_nulls().first())
    return keys.join(each, on="of").drop("of").unique(["run", *ROLLOUT])


def _texts(frames: Frames, found: Sequence[StepLineage], name: str, sampled: bool) -> pl.DataFrame:
    """Return what the messages of each rollout say, sampled or given, as one text."""
    made = {
        (each.traces.key, source.key): source
        for each in found
        for source in frames.graph.origins(each.traces, "messages")
    }
    rows = frames.rows(present(*made.values()), "messages").filter(pl.col("sampled") == sampled)
    beside = pl.when(pl.col("body").str.contains(MORE)).then("body") if sampled else pl.lit(None, pl.String)
    read = rows.select("trace_id", "message", "content", beside.alias("beside"), of="key").collect()
    texts = _join_texts(read.with_columns(content=_said_text()), name)
    keys = pl.DataFrame(list(made), {"key": pl.String, "of": pl.String}, orient="row")
    return keys.join(texts, on="of").drop("of").unique(ROLLOUT)


def _said_text() -> pl.Expr:
    """Return what a message says: its thoughts, its content and its tool calls, each on lines of its own."""
    beside = pl.col("beside")
    thoughts, calls = (beside.str.json_path_match(f"$.{name}") for name in ("reasoning_content", "tool_calls"))
    said = pl.concat_str(thoughts, "content", calls, separator="\n", ignore_nulls=True)
    return pl.when(beside.is_null()).then("content").otherwise(said)


def _join_texts(rows: pl.DataFrame, name: str) -> pl.DataFrame:
    """Return one text for each rollout, of its messages in order."""
    in_order = rows.filter(pl.col("content").is_not_null()).sort("message", maintain_order=True)
    texts = in_order.group_by("of", "trace_id").agg("content")
    return texts.select("of", "trace_id", pl.col("content").list.join("\n").alias(name))

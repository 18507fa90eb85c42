"""What Python shows of a store, a run and a rollout when a notebook or a prompt prints them, texts included.

Texts of models and environments are made harmless here: controls are shown by signs, and HTML is escaped.
"""

import html
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flows.reporting.formats import compact_number, seconds, visible

if TYPE_CHECKING:
    import polars as pl

HEADINGS = ("run", "kind", "state", "steps", "reward", "held out", "changed")
STEPS = {
    "reward/all/mean": "reward",
    "num_output_tokens/all": "tokens out",
    "errored_rollout/all": "errored",
    "update/loss": "loss",
    "update/entropy": "entropy",
    "update/mismatch_kl": "mismatch KL",
}
"""Columns of the steps that are shown, and their headings."""
LAST_STEPS = 5
LONGEST = 600
"""Characters of a text that are shown; the frames have all of it."""


class Printable(ABC):
    """Something that a prompt and a notebook print in a readable form: `parts` are texts and tables in order."""

    @abstractmethod
    def parts(self) -> "Iterable[str | FirstTable]":
        """Return what is shown, in order."""

    def __repr__(self) -> str:
        return "\n".join(str(each) for each in self.parts())

    def _repr_html_(self) -> str:
        return "".join(
            each.as_html() if isinstance(each, FirstTable) else as_html(each) for each in self.parts() if each
        )


def as_html(text: str) -> str:
    """Return a text as a block of HTML that keeps its lines."""
    return f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>"


class FirstTable:
    """A small table of texts."""

    def __init__(self, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        self.headings, self.rows = headings, [*rows]

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.headings, *self.rows, strict=True)]
        lines = ("  ".join(map(str.ljust, each, widths)).rstrip() for each in (self.headings, *self.rows))
        return "\n".join(lines)

    def as_html(self) -> str:
        """Return it as an HTML table."""
        head = "".join(f"<th>{html.escape(each)}</th>" for each in self.headings)
        cells = ("".join(f"<td>{html.escape(each)}</td>" for each in row) for row in self.rows)
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def run_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a run, as HEADINGS names them."""
    rewards = [compact_number(each) for each in row["rewards"] if each is not None]
    planned = "" if row["steps_planned"] is None else f"/{row['steps_planned']}"
    ago = (datetime.now(UTC) - row["changed_at"]).total_seconds()
    return (
        visible(row["run"]),
        row["kind"],
        row["state"],
        f"{row['steps_done']}{planned}",
        " to ".join(dict.fromkeys(rewards[:1] + rewards[-1:])) or "-",
        compact_number(row["held_out"]),
        f"{seconds(max(ago, 0.0))} ago",
    )


def step_grid(steps: "pl.DataFrame") -> FirstTable:
    """Return the last steps of a run with the numbers that say most; a number that no step has is left out."""
    known = {name: title for name, title in STEPS.items() if name in steps.columns}
    last = steps.tail(LAST_STEPS)
    rows = ([str(row["step"]), *(compact_number(row[name]) for name in known)] for row in last.to_dicts())
    return FirstTable(("step", *known.values()), rows)


def rollout_text(row: Mapping[str, Any]) -> str:
    """Return one rollout of a frame with texts: what it earned, what was asked, what the model wrote."""
    reward, advantage = compact_number(row["reward"]), compact_number(row["advantage"])
    head = f"rollout {row['trace_id'][:8]}: reward {reward}, advantage {advantage}, {row['outcome']}"
    return f"{head}\n  asked:  {shorten(row['prompt'])}\n  answer: {shorten(row['reply'])}"


def shorten(text: str | None) -> str:
    """Return a text as it may be printed, cut where it is long."""
    whole = visible(text or "").replace("\n", "\n          ")
    return whole if len(whole) <= LONGEST else f"{whole[:LONGEST]} ... ({len(whole) - LONGEST} characters more)"


def with_prompts(traces: "pl.DataFrame", messages: "pl.LazyFrame") -> "pl.DataFrame":
    """Return traces with two columns more: `prompt`, all before the first reply, and `reply`, all that was replied."""
    import polars as pl

    wanted = traces["trace_id"].unique()
    rows = messages.filter(pl.col("trace_id").is_in(wanted.implode())).select("trace_id", "message", "role", "content")
    replied = pl.col("role") == "assistant"
    first = pl.col("message").filter(replied).min()
    texts = (
        rows.collect()
        .sort("trace_id", "message")
        .group_by("trace_id")
        .agg(
            prompt=pl.col("content").filter(~replied & (pl.col("message") < first).fill_null(True)).str.join("\n"),
            reply=pl.col("content").filter(replied).str.join("\n"),
        )
    )
    return traces.join(texts, on="trace_id", how="left", maintain_order="left")

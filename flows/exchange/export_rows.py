"""The rollouts that are to be exported: those of a run, those that a question names, or both."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from flows.exchange.drafts import ExportRefused
from flows.recorded import SAMPLING
from storage.frames import Frames
from storage.questions import ask
from storage.refs import Entry
from storage.store import Store
from tasks.columns import texts
from tasks.exchange.episodes import Row
from tasks.fates import DERIVED


@dataclass(frozen=True)
class Choice:
    """Which rollouts; what is empty or None leaves nothing out."""

    run: str = ""
    sql: str = ""
    first_step: int = 0
    last_step: int | None = None
    """The step before which the export ends."""
    kept: bool = False
    """Only traces that the filters kept."""
    min_reward: float | None = None
    held_out: bool = False
    """Whether attempts at held-out examples are among them; training on those would spoil every evaluation."""


@dataclass(frozen=True)
class Sampled:
    """The rollouts of one step, and which of them were chosen."""

    run: str
    step: int
    traces: tuple[Row, ...]
    messages: Mapping[str, list[Row]]
    """By trace, in order of message."""
    assignments: Mapping[str, Row]
    examples: Mapping[tuple[str, str], Row]
    chosen: frozenset[str]
    """Ids of the chosen traces."""

    @property
    def chosen_traces(self) -> list[tuple[Row, list[Row]]]:
        """The chosen traces with their messages."""
        chosen = [row for row in self.traces if row["trace_id"] in self.chosen]
        return [(row, self.messages.get(row["trace_id"], [])) for row in chosen]


def sampled(store: Store, choice: Choice) -> Iterator[Sampled]:
    """Yield the steps that have chosen rollouts, in order of run and step.

    Where a replay scored traces again, the new rewards are what is exported. Raises ExportRefused for a question
    without a column `trace_id`, QuestionError for one that is no question, RunUnknown.
    """
    if choice.run:
        store.runs.events(choice.run)
    wanted = _asked(store, choice.sql) if choice.sql else None
    for entry in _entries(store, choice):
        traces = store.read(_scored(store, entry).slices("traces"))
        chosen = _chosen(store, entry, traces, choice, wanted)
        if chosen:
            yield _step(store, entry, traces, chosen)


def _asked(store: Store, sql: str) -> set[str]:
    answer = ask(Frames(store, DERIVED), sql)
    if "trace_id" not in answer.column_names:
        raise ExportRefused(
            f"--sql: the answer has the columns {', '.join(answer.column_names)}; it needs `trace_id`, which says what "
            "is exported. Nothing was written."
        )
    return set(texts(answer["trace_id"].cast(pa.string())))


def _entries(store: Store, choice: Choice) -> list[Entry]:
    """Return the finished work that made traces, each once, whichever runs share it."""
    found: dict[str, Entry] = {}
    for entry in store.ledger.entries(run=choice.run or None):
        held_out = "evaluation_assignment" in entry.inputs and not choice.held_out
        if entry.stage in SAMPLING and not entry.part and not held_out:
            within = choice.first_step <= entry.step and (choice.last_step is None or entry.step < choice.last_step)
            if within:
                found.setdefault(entry.key, entry)
    return list(found.values())


def _scored(store: Store, entry: Entry) -> Entry:
    """Return the work that has the run's rewards: that of scoring the traces again, where the run did."""
    again = [e for e in store.ledger.entries(run=entry.run, stage="regrade") if entry.key in e.inputs.values()]
    return again[-1] if again else entry


def _chosen(store: Store, entry: Entry, traces: pa.Table, choice: Choice, wanted: set[str] | None) -> frozenset[str]:
    keep = _kept(store, entry) if choice.kept else None
    return frozenset(
        trace_id
        for trace_id, reward in zip(texts(traces["trace_id"]), traces["reward"].to_pylist(), strict=True)
        if (wanted is None or trace_id in wanted)
        and (keep is None or trace_id in keep)
        and (choice.min_reward is None or (reward is not None and reward >= choice.min_reward))
    )


def _kept(store: Store, entry: Entry) -> set[str]:
    keys = {entry.key, _scored(store, entry).key}
    verdicts = [e for e in store.ledger.entries(run=entry.run, stage="filtering") if keys & set(e.inputs.values())]
    if not verdicts:
        raise ExportRefused(
            f"--kept: run {entry.run!r} has not filtered the rollouts of step {entry.step}, so none of them is known "
            f"to be kept. Nothing was written. Export them without --kept, or name a replay that filters them."
        )
    rows = store.read(verdicts[-1].slices("verdicts"), ["trace_id", "keep"])
    return {row["trace_id"] for row in rows.to_pylist() if row["keep"]}


def _step(store: Store, entry: Entry, traces: pa.Table, chosen: frozenset[str]) -> Sampled:
    messages: dict[str, list[Row]] = {}
    for row in store.read(entry.slices("messages")).to_pylist():
        messages.setdefault(row["trace_id"], []).append(row)
    assigned = _inputs(store, entry, "assignments", ("assignment", "evaluation_assignment"))
    examples = _inputs(store, entry, "examples", ("examples",))
    return Sampled(
        run=entry.run,
        step=entry.step,
        traces=tuple(traces.to_pylist()),
        messages={name: sorted(rows, key=lambda row: row["message"]) for name, rows in messages.items()},
        assignments={row["assignment_id"]: row for row in assigned},
        examples={(row["environment"], row["example_id"]): row for row in examples},
        chosen=chosen,
    )


def _inputs(store: Store, entry: Entry, table: str, names: Sequence[str]) -> list[Row]:
    key = next(entry.inputs[name] for name in names if name in entry.inputs)
    made = store.ledger.find(key, run=entry.run)
    assert made is not None, f"{entry.stage} {entry.key} names {key}, which is not in the ledger"
    rows: list[Row] = store.read(made.slices(table)).to_pylist()
    return rows

"""Accounting: the outcome of every rollout that a step assigned and of its tokens, and the metrics of that."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import texts
from tasks.arrays.finding import QUARANTINED
from tasks.arrays.group_counts import admitted_groups
from tasks.inference.trace_rows.failures import STALE as STALE_CLASS
from tasks.inference.trace_rows.failures import STRAGGLER, UNSCORED
from tasks.runtime.stage import Tables
from tasks.runtime.stored_rows import StoredRows

TRAINED, FILTERED, ERRORED, NO_WEIGHT = "trained", "filtered", "errored", "no weight"
STOPPED = "stopped"
"""Given up because enough others had ended: nothing failed."""
STALE = "stale"
"""Given up because it was too old for any step of its stream before one took it: nothing failed."""
GIVEN_UP = (STOPPED, STALE)
"""The outcomes of rollouts that did not fail and were not waited for."""
PENDING, REFUSED = "pending", "refused"
"""Not through all stages; held back by a gate."""
EVALUATED = "evaluated"
"""Sampled to score a policy, never to train on."""

COLUMNS = ["trace_id", "episode_id", "assignment_id", "error_class"]
"""What accounting reads of a trace."""
CHECKED = ("assignments", "traces", "verdicts", "samples", "batches")
"""The tables that account for every rollout of a step together."""


class AccountBreach(ValueError):
    """A rollout is unaccounted for, or accounted for twice."""

    def __init__(self, table: str, column: str, what: str) -> None:
        super().__init__(
            f"table {table}, column {column}: {what}. Every assignment must be trained, filtered, quarantined, "
            "errored, given up, unscored or without weight, exactly once. The rows stay as they are; look at the "
            "stage that wrote the table before going on."
        )
        self.table, self.what = table, what


def account_step(tables: Tables) -> Counter[tuple[str, str]]:
    """Return `account` of the tables of a step, by name: with `intakes`, of the groups that the step took."""
    groups = [tables[name] for name in ("intakes", "stale_groups") if name in tables]
    # With intakes, groups of other steps' assignments are among them.
    taken = {"assignments": taken_assignments(*groups)} if groups else {}
    return account(*({**tables, **taken}[name] for name in CHECKED))


def account(
    assignments: pa.Table, traces: pa.Table, verdicts: pa.Table, credits: pa.Table, batches: pa.Table
) -> Counter[tuple[str, str]]:
    """Return how many traces had which outcome and detail; every trace is in exactly one of these.

    Outcomes are trained, filtered, quarantined, errored, stopped, stale, unscored, or no weight: kept, but without a
    token that any component weighs. The detail is the filter or the error class; empty otherwise.

    Raises AccountBreach if an assignment has no trace, a trace no assignment, an assignment two episodes; if a trace is
    there twice, or verdicts are not one per trace; if a trace is trained without being kept, or a sample twice. One
    agent may play several times in an episode.
    """
    rows = traces.select(COLUMNS).to_pylist()
    check_assignments(texts(assignments["assignment_id"]), rows)
    reasons = _reasons(verdicts, rows)
    trained = packed_traces(credits, batches)
    found = Counter(_outcome(row, reasons[row["trace_id"]], trained) for row in rows)
    unknown = trained - reasons.keys()
    if unknown:
        raise AccountBreach("batches", "sample_ids", f"trace {min(unknown)} is trained but is not in table traces")
    return found


def taken_assignments(*groups: pa.Table) -> pa.Table:
    """Return the assignments that a step has to account for where it took its groups from a stream.

    `groups` are its rows of `intakes` and, where there are any, of `stale_groups`.
    """
    names = [pc.list_flatten(each["assignment_ids"]) for each in groups]
    return pa.concat_tables([pa.table({"assignment_id": each}) for each in names])


def _outcome(row: dict[str, Any], reason: str | None, trained: set[str]) -> tuple[str, str]:
    excluded = reason is not None or row["error_class"] is not None
    if excluded and row["trace_id"] in trained:
        raise AccountBreach("batches", "sample_ids", f"trace {row['trace_id']} is trained although it was not kept")
    return outcome_of(row["error_class"], reason, TRAINED if row["trace_id"] in trained else NO_WEIGHT)


def outcome_of(error_class: str | None, reason: str | None, otherwise: str) -> tuple[str, str]:
    """Return outcome and detail of a rollout by its error and its verdict; `otherwise` is that of one that is kept.

    Of a rollout that scored a policy, `otherwise` EVALUATED, an error is only the detail.
    """
    if otherwise == EVALUATED:
        return EVALUATED, error_class or ""
    # Before the other errors: they have classes like theirs, but nothing failed.
    if error_class == STRAGGLER:
        return STOPPED, ""
    if error_class == STALE_CLASS:
        return STALE, ""
    if error_class == UNSCORED:
        return UNSCORED, ""
    if error_class is not None:
        return ERRORED, error_class
    if reason == QUARANTINED:
        return QUARANTINED, ""
    if reason is not None:
        return FILTERED, reason
    return otherwise, ""


def check_assignments(assigned: list[str], rows: list[dict[str, Any]]) -> None:
    """Raise AccountBreach unless each assignment has one episode among rows of traces, and each trace one of them."""
    _once(assigned, "assignments", "assignment_id", "assignment")
    answered = {row["assignment_id"] for row in rows}
    if missing := set(assigned) - answered:
        raise AccountBreach(
            "traces", "assignment_id", f"{len(missing)} assignments left no trace, first {min(missing)}"
        )
    if strange := answered - set(assigned):
        raise AccountBreach("traces", "assignment_id", f"{min(strange)} was never assigned")
    _once((row["trace_id"] for row in rows), "traces", "trace_id", "trace")
    # Pairs and not rows: several agents, or one agent several times, may have traces in an episode.
    episodes = {(row["assignment_id"], row["episode_id"]) for row in rows}
    _once((assignment for assignment, _ in episodes), "traces", "episode_id", "assignment with its own episode")


def _reasons(verdicts: pa.Table, rows: list[dict[str, Any]]) -> dict[str, str | None]:
    _once(texts(verdicts["trace_id"]), "verdicts", "trace_id", "trace")
    reasons = dict(zip(texts(verdicts["trace_id"]), verdicts["reason"].to_pylist(), strict=True))
    if differing := reasons.keys() ^ {row["trace_id"] for row in rows}:
        what = f"{len(differing)} traces lack a verdict, or verdicts a trace, first {min(differing)}"
        raise AccountBreach("verdicts", "trace_id", what)
    return reasons


def packed_traces(credits: pa.Table, batches: pa.Table) -> set[str]:
    """Return the traces that have a sample in the batches. Raises AccountBreach where a sample is twice or unknown."""
    packed = [str(sample) for sample in pc.list_flatten(batches["sample_ids"]).to_pylist()]
    _once(packed, "batches", "sample_ids", "sample")
    trace_of = dict(zip(texts(credits["sample_id"]), texts(credits["trace_id"]), strict=True))
    if unknown := set(packed) - trace_of.keys():
        raise AccountBreach("batches", "sample_ids", f"sample {min(unknown)} is packed but is not in table samples")
    return {trace_of[sample] for sample in packed}


def _once(values: Iterable[Any], table: str, column: str, noun: str) -> None:
    value, times = next(iter(Counter(values).most_common(1)), (None, 0))
    if times > 1:
        raise AccountBreach(table, column, f"{noun} {value} is there {times} times")


def account_metrics(tables: Tables) -> dict[str, float]:
    """Return how many rollouts met which outcome: `accounting/trained`, `accounting/filtered/zero_advantage`.

    Of a step that was not trained, what nothing held back is pending, or refused where a gate said no. An outcome that
    no rollout met has no entry. Raises AccountBreach where the step was packed and a rollout is lost or counted twice.
    """
    refused = "decisions" in tables and not all(tables["decisions"]["approved"].to_pylist())
    of_packed = TRAINED if "updates" in tables else REFUSED if refused else PENDING
    if all(name in tables for name in CHECKED):
        found = account_step(tables)
        counts = {(of_packed if outcome == TRAINED else outcome, detail): n for (outcome, detail), n in found.items()}
    else:
        counts = dict(Counter(_outcomes(tables, of_packed)))
    return {"/".join(filter(None, ("accounting", *outcome))): float(count) for outcome, count in sorted(counts.items())}


def group_metrics(wanted: int, num_batches: int, assignments: pa.Table, credits: StoredRows) -> dict[str, float]:
    """Return how many groups a step wanted, drew and has something to train on of, and in how many batches."""
    counts = {
        "wanted": wanted,
        "drawn": len(set(texts(assignments["group_id"]))),
        "admitted": len(admitted_groups(credits)),
        "batches": num_batches,
    }
    return {f"groups/{name}": float(count) for name, count in counts.items()}


def _outcomes(tables: Tables, of_packed: str) -> Iterator[tuple[str, str]]:
    """Yield outcome and detail of every rollout of a step that came no further than some of its tables."""
    judged = tables.get("verdicts")
    reasons = dict(zip(texts(judged["trace_id"]), judged["reason"].to_pylist(), strict=True)) if judged else {}
    packed = packed_traces(tables["samples"], tables["batches"]) if {"samples", "batches"} <= tables.keys() else None
    for row in tables["traces"].select(["trace_id", "error_class"]).to_pylist():
        kept = of_packed if packed is None or row["trace_id"] in packed else NO_WEIGHT
        yield outcome_of(row["error_class"], reasons.get(row["trace_id"]), kept)

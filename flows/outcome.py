"""Outcome: what a run made, step by step, as plain data for panels, artifacts, monitors and programs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.filters import filter_name
from flows.corrections.quarantine_kept import kept_in_quarantine
from flows.metrics import step_metrics
from flows.runtime.group_refill import group_counts, short_of_groups
from flows.runtime.pipeline import StepBatch
from flows.runtime.session import Session
from flows.token_metrics import step_token_metrics
from storage.schemas.stage_tables import TRACES, VERDICTS
from tasks.inference.sampling.failures import STRAGGLER
from tasks.metrics.accounting import TRAINED, AccountBreach, Share, account
from tasks.metrics.retokenised import COLUMNS as MESSAGE_COLUMNS
from tasks.metrics.retokenised import retokenised_turns
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy, Ref

TRACE_COLUMNS = [field.name for field in TRACES.arrow if field.name not in ("record", "info", "error_traceback")]


LOW_SIGNAL = 0.1
"""Share of a step's rollouts at or below which it is said that hardly anything could be trained on."""


@dataclass
class Outcome:
    """A run so far."""

    run: str
    num_steps: int
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    """How the figures of the last policy differ from those of the first, by set and environment."""
    policy: Policy | None = None
    num_computed: int = 0
    """Pieces of work that were computed now."""
    num_found: int = 0
    """Pieces of work that the ledger already had."""

    def add(self, step: dict[str, Any]) -> None:
        """Add a finished step."""
        self.steps.append(step)

    def finished(self, session: Session) -> dict[str, Any]:
        """Return the outcome as plain JSON values, with what the session counted."""
        self.num_computed, self.num_found = session.num_computed, session.num_found
        return asdict(self)


def check_account(session: Session, drawn: StepBatch) -> list[Share]:
    """Return what became of every rollout of a step. Raises AccountBreach where one is lost or counted twice."""
    place = session.place
    tables = (
        place.table("assignments", drawn.assignments, ["assignment_id"]),
        place.table("traces", drawn.traces, TRACE_COLUMNS),
        place.table("verdicts", [drawn.filtering], ["trace_id", "keep", "reason"]),
        place.table("credits", [drawn.advantage], ["sample_id", "trace_id"]),
        place.table("batches", [drawn.packing], ["sample_ids"]),
    )
    try:
        return account(*tables)
    except AccountBreach as error:
        error.add_note(f"Run {place.run}, step {drawn.packing.step}, between the stages packing and training.")
        raise


def finish_step(session: Session, step: int, drawn: StepBatch, trained: Ref) -> dict[str, Any]:
    """Describe a finished step and tell the watchers."""
    described = describe_step(session, step, drawn, trained)
    session.tell("step", **described)
    if described["computed"] and (warning := low_signal(described)):
        session.tell("note", text=warning)
    if described["computed"] and (warning := short_of_groups(step, described.get("groups", {}))):
        session.tell("note", text=warning)
    if warning := kept_in_quarantine(session, drawn):
        session.tell("note", text=warning)
    return described


def low_signal(described: Mapping[str, Any]) -> str:
    """Return a warning where hardly anything of a step could be trained on; empty where that is not so."""
    trained = sum(share["num_traces"] for share in described["fates"] if share["fate"] == TRAINED)
    if trained > LOW_SIGNAL * described["num_traces"]:
        return ""
    return (
        f"step {described['step']}: only {trained} of {described['num_traces']} rollouts could be trained on; look at "
        f"the environment: are its examples too easy or too hard, or its rewards all the same?"
    )


def describe_step(session: Session, step: int, drawn: StepBatch, trained: Ref) -> dict[str, Any]:
    """Return a finished step as plain values, see `describe`."""
    return describe(session, step, (*drawn.refs, trained), drawn)


def describe(session: Session, step: int, refs: Sequence[Ref], drawn: StepBatch | None) -> dict[str, Any]:
    """Return what is done of a step as plain values: reward, tokens, seconds and rows by stage, fates, the update.

    `drawn` is None where the step has no batches, and the update is None where nothing was trained.
    """
    computed = any(ref.computed for ref in refs)
    place = session.place
    # Of a step that was found, only the gist is shown.
    shares = check_account(session, drawn) if computed and drawn else []
    made = {table for ref in refs for table, _ in ref.rows}
    stages = list(dict.fromkeys(ref.stage for ref in refs))
    traces = place.table("traces", refs, TRACE_COLUMNS)
    verdicts = place.table("verdicts", refs) if "verdicts" in made else VERDICTS.arrow.empty_table()
    update = place.table("updates", refs).to_pylist()[-1] if "updates" in made else None
    seconds = {stage: sum(ref.seconds for ref in refs if ref.stage == stage) for stage in stages}
    groups = group_counts(place, drawn) if drawn else {}
    fates = {"/".join(filter(None, (share.fate, share.detail))): share.num_traces for share in shares}
    filters = [filter_name(each) for each in place.config.filtering.filters] if verdicts.num_rows else []
    return {
        "step": step,
        "computed": computed,
        **rewards(traces),
        "fates": [asdict(share) for share in shares],
        "tokens": pc.sum(pc.add(traces["num_input_tokens"], traces["num_output_tokens"])).as_py() or 0,
        "seconds": seconds,
        "rows": rows_of(refs),
        "stage_tokens": {stage: sum(ref.tokens for ref in refs if ref.stage == stage) for stage in stages},
        "update": update,
        "metrics": step_metrics(
            traces, verdicts, update, fates, seconds, filters, _retokenised(place, refs, traces, computed)
        )
        | (step_token_metrics(place, refs) if computed else {})
        | {f"groups/{name}": float(count) for name, count in groups.items()},
        **({"groups": groups} if groups else {}),
    }


def _retokenised(place: RunContext, refs: Sequence[Ref], traces: pa.Table, computed: bool) -> dict[str, int] | None:
    """Return how many replies were tokenised again, by trace; None of a step that was found.

    A trace of one branch has none: messages are read only where there is another one.
    """
    if not computed:
        return None
    several = (pc.max(traces["num_branches"]).as_py() or 0) > 1
    return retokenised_turns(place.table("messages", refs, list(MESSAGE_COLUMNS))) if several else {}


def rows_of(refs: Sequence[Ref]) -> dict[str, dict[str, int]]:
    """Return the rows that were made, by stage and table."""
    rows: dict[str, dict[str, int]] = {}
    for ref in refs:
        of_stage = rows.setdefault(ref.stage, {})
        of_stage |= {table: of_stage.get(table, 0) + count for table, count in ref.rows}
    return rows


def rewards(traces: pa.Table) -> dict[str, Any]:
    """Return mean and spread of the rewards that there are; None where there is none, which is not zero."""
    scored = traces["reward"].drop_null()
    return {
        "reward": pc.mean(scored).as_py(),
        "reward_std": pc.stddev(scored).as_py() if len(scored) else None,
        "num_traces": traces.num_rows,
        "num_errored": sum(kind not in (None, STRAGGLER) for kind in traces["error_class"].to_pylist()),
    }

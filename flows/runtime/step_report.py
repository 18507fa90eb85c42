"""Reports each finished step, and a whole run, as plain data for panels, artifacts, monitors and programs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from flows.queries.metrics import Span, ledger_metrics
from flows.queries.tracked_rows import COLUMNS, sample_rollouts
from flows.reporting.messages import measured_step
from flows.runtime.records import FinishedStep
from flows.runtime.session import Session
from tasks.metrics.accounting import TRAINED
from tasks.metrics.figures import Values, metric_values
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy, Ref

JsonObject = dict[str, Any]
"""Plain values by name."""
# Below a tenth, most of the sampling was for nothing; what is usual with filters is well above.
LOW_SIGNAL = 0.1
"""Share of a step's rollouts at or below which it is said that hardly anything could be trained on."""


@dataclass
class Outcome:
    """A run so far."""

    run: str
    num_steps: int
    steps: list[JsonObject] = field(default_factory=list)
    evaluations: list[JsonObject] = field(default_factory=list)
    comparisons: list[JsonObject] = field(default_factory=list)
    """How the figures of the last policy differ from those of the first, by set and environment."""
    policy: Policy | None = None
    num_computed: int = 0
    """Pieces of work that were computed now."""
    num_found: int = 0
    """Pieces of work that the ledger already had."""

    def as_values(self, session: Session) -> JsonObject:
        """Return the outcome as plain JSON values, with what the session counted."""
        self.num_computed, self.num_found = session.num_computed, session.num_found
        return asdict(self)


def finish_step(session: Session, finished: FinishedStep) -> JsonObject:
    """Describe a finished step and tell the watchers."""
    described = describe(session.context, finished.step, finished.refs)
    notify_step(session, described, finished.refs)
    # The warning of a cached step was read when it was computed.
    if described["computed"] and (warning := low_signal(described)):
        session.notify("note", text=warning)
    return described


def notify_step(session: Session, described: Mapping[str, Any], refs: Sequence[Ref]) -> None:
    """Show a described step in Prefect and tell the watchers of it.

    Beside it they get `values` by scope and measure, and what makes its `samples`.
    """
    session.task_runs.finish_step(described)
    samples = partial(step_samples, session.context, refs)
    session.notify("step", **described, values=step_values(session.context, refs), samples=samples)


def step_values(context: RunContext, refs: Sequence[Ref]) -> Values:
    """Return the metrics of a step, with `ledger_metrics` beside them."""
    written = metric_values(context.table("metrics", refs)) if _makes(refs, "metrics") else {}
    return written | ledger_metrics([Span(ref.stage, ref.seconds, ref.tokens) for ref in refs])


def step_samples(context: RunContext, refs: Sequence[Ref], count: int) -> list[JsonObject]:
    """Return so many sample rollouts of a step."""
    tables = {name: context.rows(name, refs) for name in COLUMNS if _makes(refs, name)}
    return sample_rollouts(tables, count)


def _makes(refs: Sequence[Ref], table: str) -> bool:
    return any(table in dict(ref.rows) for ref in refs)


def low_signal(described: Mapping[str, Any]) -> str:
    """Return a warning where hardly anything of a step could be trained on; empty where that is not so."""
    trained = sum(share["num_traces"] for share in described["outcomes"] if share["outcome"] == TRAINED)
    if trained > LOW_SIGNAL * described["num_traces"]:
        return ""
    return (
        f"step {described['step']}: only {trained} of {described['num_traces']} rollouts could be trained on; look at "
        f"the environment: are its examples too easy or too hard, or its rewards all the same?"
    )


def describe(context: RunContext, step: int, refs: Sequence[Ref]) -> JsonObject:
    """Return what is done of a step as plain values: reward, tokens, seconds by stage, outcomes, the update.

    The numbers are those of the step's table `metrics`, with `ledger_metrics` beside them; a number that was not
    measured is None, and the update is None where nothing was trained.
    """
    values = step_values(context, refs)
    update = context.table("updates", refs).to_pylist()[-1] if _makes(refs, "updates") else None
    return {
        **measured_step(step, values),
        "computed": any(ref.computed for ref in refs),
        "runs": list(dict.fromkeys(ref.run for ref in refs if not ref.computed)),
        "update": update,
    }

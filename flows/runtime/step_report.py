"""Reports each finished step, and a whole run, as plain data for panels, artifacts, monitors and programs."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from flows.queries.metrics import Span, ledger_metrics
from flows.queries.run_state import warning_message
from flows.queries.tracked_rows import COLUMNS, sample_rollouts
from flows.reporting.messages import measured_step
from flows.runtime.executor import FinishedStep
from flows.runtime.session import Session
from storage.records import WARNING
from tasks.metrics.accounting import TRAINED
from tasks.metrics.figures import Values, metric_values
from tasks.metrics.warnings import PAST, TRACE_COLUMNS, WINDOW, Hit, Replies, figure_hits, phrase_hits
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy, Ref

JsonObject = dict[str, Any]
"""Plain values by name."""
# Below a tenth, most of the sampling was for nothing; what is usual with filters is well above.
LOW_SIGNAL = 0.1
"""Share of a step's rollouts at or below which it is said that hardly anything could be trained on."""


class DescribedSteps:
    """What `finish_step` returned of the steps of a run: the last ones as they are, all of them packed.

    A step is 180 figures by name and more, 20 kB as objects, and 3 kB packed.
    """

    def __init__(self) -> None:
        self.last: list[JsonObject] = []
        """As many as warnings look at."""
        self._packed: list[bytes] = []

    def append(self, described: JsonObject) -> None:
        """Add the newest step."""
        self.last = [*self.last, described][-WINDOW:]
        self._packed.append(zlib.compress(json.dumps(described).encode()))

    def unpack(self) -> list[JsonObject]:
        """Return all steps."""
        return [json.loads(zlib.decompress(step)) for step in self._packed]


def run_outcome(
    session: Session,
    steps: list[JsonObject],
    policy: Policy | None,
    evaluations: Sequence[JsonObject] = (),
    comparisons: Sequence[JsonObject] = (),
) -> JsonObject:
    """Return the outcome of a run as plain values, with the results that the session computed and found.

    `comparisons` say how the figures of the last policy differ from those of the first, by set and environment.
    """
    return {
        "run": session.context.run,
        "num_steps": session.config.steps,
        "steps": steps,
        "evaluations": [*evaluations],
        "comparisons": [*comparisons],
        "policy": policy and asdict(policy),
        "num_computed": session.num_computed,
        "num_found": session.num_found,
    }


def finish_step(session: Session, finished: FinishedStep, earlier: Sequence[JsonObject] = ()) -> JsonObject:
    """Describe a finished step and tell the watchers, also of rules that hold since it; `earlier` are those before."""
    described = describe(session.context, finished.step, finished.refs)
    hits, figures = find_warnings(session, described, finished, earlier)
    described["metrics"] |= figures
    described["warnings"] = [hit._asdict() for hit in hits]
    notify_step(session, described, finished.refs, figures)
    for hit in hits:
        session.record(WARNING, hit.step, warning_message(hit))
        session.notify("warning", **hit._asdict() | {"text": f"step {hit.step}: {hit.rule}: {hit.text}"})
    num_traces = described["num_traces"]
    trained = sum(share["num_traces"] for share in described["outcomes"] if share["outcome"] == TRAINED)
    # The warning of a cached step was read when it was computed.
    if described["computed"] and trained <= LOW_SIGNAL * num_traces:
        text = (
            f"step {finished.step}: only {trained} of {num_traces} rollouts could be trained on; look at the "
            "environment: are its examples too easy or too hard, or its rewards all the same?"
        )
        session.notify("note", text=text)
    return described


def find_warnings(
    session: Session, described: JsonObject, finished: FinishedStep, earlier: Sequence[JsonObject]
) -> tuple[list[Hit], dict[str, float]]:
    """Return the rules that begin to hold at a step, and its figures of warnings and replies; none of a cached one."""
    if session.config.kind != "train":
        return [], {}
    session.replies[finished.step] = read = cache(partial(_replies, session.context, finished.batch.traces))
    session.replies.pop(finished.step - max(PAST) - 1, None)
    last = session.replies.get(finished.step - 1)
    if not described["computed"]:
        return [], {}
    figures = read().figures()
    now = {**described, "metrics": described["metrics"] | figures}
    past = [session.replies[step]() for ago in PAST if (step := finished.step - ago) in session.replies]
    said = {hit["where"] for step in earlier[-max(PAST) :] for hit in step["warnings"]}
    phrases = phrase_hits(finished.step, past, last(), read()) if last else []
    hits = [*figure_hits([*earlier[-WINDOW:], now]), *(hit for hit in phrases if hit.where not in said)]
    return hits, figures | {"warnings": float(len(hits)), **{f"warnings/{hit.rule}": 1.0 for hit in hits}}


def _replies(context: RunContext, refs: Sequence[Ref]) -> Replies:
    return Replies.read(context.table("traces", refs, TRACE_COLUMNS), context.rows("messages", refs))


def notify_step(
    session: Session, described: JsonObject, refs: Sequence[Ref], figures: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Show a described step in Prefect and tell the watchers of it.

    Beside it they get `values` by scope and measure, `figures` among them, and what makes its `samples`.
    """
    samples = partial(step_samples, session.context, refs)
    values = step_values(session.context, refs) | {("", name): value for name, value in figures.items()}
    session.notify("step", **described, values=values, samples=samples)


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

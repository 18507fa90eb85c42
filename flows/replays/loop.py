"""Runs an open session of a replay to its end, or plans it, and says what it came to beside what was recorded."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from configs.replay import replayed_stages
from configs.run import RunConfig
from configs.store import default_store
from flows.orchestration.states import EmptyBatch, GateRefused
from flows.queries.compare import compare
from flows.queries.compare_summary import sheets, summary_lines
from flows.queries.step_history import RecordedStep
from flows.queries.store_reader import StoreReader
from flows.replays.request import refuse_removed
from flows.replays.steps import ReplayedStep, replay_steps
from flows.reporting.artifacts import artifact_key, escape
from flows.reporting.formats import markdown_table, visible
from flows.runtime.executor import Executor
from flows.runtime.plan import plan_work, unique_results
from flows.runtime.resolve_run import Source
from flows.runtime.session import Session
from flows.runtime.step_report import Outcome, describe, notify_step
from storage.errors import WorkRemoved
from storage.store import Store
from tasks.runtime.run_context import LEDGER_SECONDS, RunContext
from tasks.runtime.stage import Policy, Ref

_log = logging.getLogger("stagecoach")
QUICK_SECONDS = 5.0
"""How long quick stages of a replay wait for others that share their commit, which takes longer than they do."""
OUTSIDE = 0.1
"""Share of a step's tokens outside the trust region above which it is said that the replay has left it."""
SAME_WEIGHTS = "weights are the recorded ones at every step"
MEASURES = ("loss", "grad_norm", "mismatch_kl", "mismatch_kl_max", "masked_fraction", "weights_sha256")


def loop_replay(session: Session) -> dict[str, Any]:
    """Replay recorded steps; return the result, beside what was recorded, as plain values."""
    config, store = session.config, session.context.store
    outcome, report = Outcome(session.context.run, config.steps), ReplayReport(session)
    try:
        with session.context.queue_commits(QUICK_SECONDS):
            for step in replay_steps(Executor(session), session.source, store):
                outcome.steps.append(report.finish(step))
                outcome.policy = step.policy or outcome.policy
    except WorkRemoved:  # its advice, to run the same again, computes no recorded work of a source that was removed
        refuse_removed(store, config.replay.run, config)
        raise
    return outcome.as_values(session)


def plan_run(context: RunContext, source: Source, policy: Policy | None = None) -> list[Ref]:
    """Return every result that the run of `context` consists of, a replay or not, cached or still to be computed."""
    return plan_replay(context, source) if context.config.kind == "replay" else plan_work(context, source, policy)


def plan_replay(context: RunContext, source: Source, executor: Callable[..., Executor] = Executor) -> list[Ref]:
    """Return every result that the replay of `context` consists of, once.

    Of one that a rule refused, those are the results up to there. `executor` makes the dry run of a context.
    """
    execute = executor(context=context)
    with suppress(EmptyBatch, GateRefused):
        deque(replay_steps(execute, source, context.store), maxlen=0)  # for what `execute` notes alone
    return unique_results(execute)


class ReplayReport:
    """Reports the steps of a replay with what was recorded of them, and warns once of each kind of problem."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._context, self._again = session.context, replayed_stages(session.config.replay)
        self._warned: set[str] = set()

    def finish(self, step: ReplayedStep) -> dict[str, Any]:
        """Describe a replayed step beside what was recorded, and notify the watchers."""
        refs = tuple(step.work.values())
        described = describe(self._context, step.step, refs)
        # The time of shared results passed when they were recorded.
        again = (*self._again, "metrics")
        described["seconds"] = {name: value for name, value in described["seconds"].items() if name in again}
        described["recorded"] = recorded = self._recorded_update(step.past)
        described["updates_apart"] = self._updates_apart(step)
        update = described["update"]
        digests = [values and values["weights_sha256"] for values in (update, recorded)]
        described["same_weights"] = digests[0] == digests[1] if update and recorded else None
        notify_step(self._session, described, refs)
        for kind, text in self._problems(step, described):
            if kind not in self._warned:  # the summary counts empty batches, and a policy that has left stays away
                self._session.notify("note", text=text)
                self._warned.add(kind)
        return described

    def _recorded_update(self, past: RecordedStep) -> dict[str, Any] | None:
        training = past.work.get("training") if "training" in self._again else None
        if training is None:
            return None
        updates = self._context.store.read(training.slices_of("updates"), list(MEASURES))
        return {"key": training.key, **updates.to_pylist()[-1]}

    def _updates_apart(self, step: ReplayedStep) -> int | None:
        """Return how many updates made the trained policy since it and the one that sampled were one, by key.

        None where they never were: rollouts of other programs, or weights from elsewhere.
        """
        sampled_by = {*self._ancestors(step.sampled_by)}
        trained = self._ancestors(step.policy_in.key if step.policy_in else None)
        return next((count for count, key in enumerate(trained) if key in sampled_by), None)

    def _ancestors(self, key: str | None) -> Iterator[str]:
        """Yield the keys of a policy and those it was trained from, newest first."""
        while key is not None:
            yield key
            entry = self._context.store.ledger.find(key, staleness=LEDGER_SECONDS)
            key = entry.inputs.get("policy") if entry else None

    def _problems(self, step: ReplayedStep, described: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the kind and the text of each warning about a step."""
        if step.batch is not None and not step.batch.packing.num_rows("batches"):
            yield "empty", f"step {step.step}: the batch is empty under these settings; the policy stays as it is"
            return
        masked = (described["update"] or {}).get("masked_fraction")
        if masked is None or masked <= OUTSIDE:
            return
        before, count = (described["recorded"] or {}).get("masked_fraction"), described["updates_apart"]
        share = "-" if before is None else f"{before:.0%}"
        updates = "no number of updates" if count is None else f"{count} update{'' if count == 1 else 's'}"
        yield (
            "outside",
            f"step {step.step}: {masked:.0%} of the tokens are outside the trust region (recorded: {share}); the "
            f"policy is {updates} away from the one that sampled. What it learns from these rollouts is less and less "
            "its own; to sample again: stagecoach replay --from rollout",
        )


def trains_again(config: RunConfig) -> bool:
    """Tell whether a run is a replay that trains."""
    return config.kind == "replay" and "training" in replayed_stages(config.replay)


def summary(outcome: dict[str, Any], config: RunConfig) -> list[str]:
    """Return the lines that end a replay: what was done, whether the weights are the recorded ones, what to look at."""
    replay, trained = config.replay, [step for step in outcome["steps"] if step["update"] is not None]
    lines = [
        f"replay {config.name} of {replay.run} from {replay.from_stage}: {outcome['num_computed']} pieces of work "
        f"computed, {outcome['num_found']} cached"
    ]
    if trains_again(config) and (num_empty := len(outcome["steps"]) - len(trained)):
        lines.append(f"{num_empty} of {len(outcome['steps'])} steps had an empty batch and trained nothing")
    compared = [step for step in trained if step["same_weights"] is not None]
    if compared:
        parted = next((f"step {step['step']}" for step in compared if not step["same_weights"]), "")
        lines.append(f"weights part from the recorded ones at {parted}" if parted else SAME_WEIGHTS)
    masked = [step["update"]["masked_fraction"] for step in trained if step["update"]["masked_fraction"] is not None]
    if masked:
        worst = max(step["update"]["mismatch_kl"] or 0.0 for step in trained)
        outside = f"at most {max(masked):.1%} of tokens outside the trust region"
        lines.append(f"importance ratio: {outside}, KL up to {worst:.2g}")
    store = "" if config.store == default_store() else f" --store {config.store}"
    return [*lines, f"compare: stagecoach diff {replay.run} {config.name}{store}"]


def publish_diff(store: Store, a: str, b: str) -> dict[str, Any]:
    """Compare two runs and show it in Prefect, in the flow run around; return the differences.

    A Prefect API that does not answer is only logged: the differences do not depend on it.
    """
    import httpx
    from prefect.artifacts import create_markdown_artifact, create_table_artifact

    found = dict(compare(StoreReader(store), a, b))
    names = f"{a}-{b}"
    about = f"Run {escape(b)} against {escape(a)}"
    try:
        create_markdown_artifact(diff_markdown(found), key=artifact_key("diff", names), description=about)
        create_table_artifact(diff_rows(found), key=artifact_key("diff-steps", names), description=f"{about}, by step")
    except httpx.HTTPError as problem:
        _log.warning("the differences are not shown in Prefect: %s", problem)
    return found


def diff_markdown(found: Mapping[str, Any]) -> str:
    """Return the differences as a page of markdown."""
    a, b = (each["run"] for each in found["runs"])
    lines = [f"# {escape(a)} and {escape(b)}"]
    for line in summary_lines(found):
        lines += ["", escape(line)]
    for sheet in sheets(found):
        cells = [map(escape, row) for row in sheet.rows]
        table = markdown_table(map(escape, sheet.headings), cells, numbers=False)
        lines += ["", f"## {escape(sheet.title)}", "", *table]
    return "\n".join(lines)


def diff_rows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the differences by step as rows of a table artifact."""
    (by_step,) = (sheet for sheet in sheets(found) if sheet.name == "steps")
    return [dict(zip(by_step.headings, map(visible, row), strict=True)) for row in by_step.rows]

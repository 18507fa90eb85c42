"""Runs an open session of a replay to its end, or plans it, and says what it came to beside what was recorded."""

import shlex
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from configs.replay import replayed_stages
from configs.run import RunConfig
from configs.store import default_store
from flows.orchestration.states import EmptyBatch, GateRefused
from flows.queries.step_history import RecordedStep
from flows.replays.request import refuse_removed
from flows.replays.steps import ReplayedStep, replay_steps
from flows.runtime.executor import Executor
from flows.runtime.loop import plan_work, unique_results
from flows.runtime.resolve_run import Source
from flows.runtime.session import Session
from flows.runtime.step_report import describe, notify_step, run_outcome
from storage.errors import WorkRemoved
from tasks.arrays.columns import texts
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy, Ref

QUICK_SECONDS = 5.0
"""How long quick stages of a replay wait for others that share their commit, which takes longer than they do; a stage
that asked a service does not wait."""
MEASURES = ["loss", "grad_norm", "mismatch_kl", "mismatch_kl_max", "masked_fraction", "weights_sha256"]


def loop_replay(session: Session) -> dict[str, Any]:
    """Replay recorded steps; return the result, beside what was recorded, as plain values."""
    config, store = session.config, session.context.store
    report, steps = ReplayReport(session), list[dict[str, Any]]()
    policy: Policy | None = None
    try:
        with session.context.queue_commits(QUICK_SECONDS):
            for step in replay_steps(Executor(session), session.source, store):
                steps.append(report.finish(step))
                policy = step.policy or policy
    except WorkRemoved:  # its advice, to run the same again, computes no recorded work of a source that was removed
        refuse_removed(store, config.replay.run, config)
        raise
    return run_outcome(session, steps, policy)


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
    """Reports the steps of a replay with what was recorded of them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._context, self._again = session.context, replayed_stages(session.config.replay)

    def finish(self, step: ReplayedStep) -> dict[str, Any]:
        """Describe a replayed step beside what was recorded, and notify the watchers."""
        refs = tuple(step.work.values())
        described = describe(self._context, step.step, refs)
        # The time of shared results passed when they were recorded.
        again = (*self._again, "metrics")
        described["seconds"] = {name: value for name, value in described["seconds"].items() if name in again}
        described["recorded"] = recorded = self._recorded_update(step.past)
        digests = [values and values["weights_sha256"] for values in (described["update"], recorded)]
        described["not_regraded"] = self._errors_of_scoring(step.work.get("regrade"))
        described["same_weights"] = digests[0] == digests[1] if all(digests) else None
        notify_step(self._session, described, refs)
        return described

    def _errors_of_scoring(self, work: Ref | None) -> dict[str, int]:
        """Return the numbers of rollouts without a score by type of error; none where nothing was scored again."""
        if work is None:
            return {}
        return Counter(texts(self._context.table("regrades", [work], ["error_type"])["error_type"].drop_null()))

    def _recorded_update(self, past: RecordedStep) -> dict[str, Any] | None:
        training = past.work.get("training") if "training" in self._again else None
        if training is None:
            return None
        updates = self._context.store.read(training.slices_of("updates"), MEASURES)
        return {"key": training.key, **updates.to_pylist()[-1]}


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
    if errors := sum((Counter(step["not_regraded"]) for step in outcome["steps"]), Counter[str]()):
        counts = ", ".join(f"{name} {count}" for name, count in sorted(errors.items()))
        lines.append(f"without a score: {counts}; the table regrades says why")
    if trains_again(config) and (num_empty := len(outcome["steps"]) - len(trained)):
        lines.append(f"{num_empty} of {len(outcome['steps'])} steps had an empty batch and trained nothing")
    compared = [step for step in trained if step["same_weights"] is not None]
    if compared:
        parted = next((f"step {step['step']}" for step in compared if not step["same_weights"]), "")
        lines.append(
            f"weights part from the recorded ones at {parted}"
            if parted
            else "weights are the recorded ones at every step"
        )
    masked = [step["update"]["masked_fraction"] for step in trained if step["update"]["masked_fraction"] is not None]
    if masked:
        worst = max(step["update"]["mismatch_kl"] or 0.0 for step in trained)
        outside = f"at most {max(masked):.1%} of tokens outside the trust region"
        lines.append(f"importance ratio: {outside}, KL up to {worst:.2g}")
    store = "" if config.store == default_store() else f" --store {shlex.quote(config.store)}"
    return [*lines, f"compare: stagecoach diff {replay.run} {config.name}{store}"]

"""plan_work: every result of a run, found in the ledger or still to be computed, by a dry run of its loop."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from configs.run import RunConfig
from flows.orchestration.states import EmptyBatch, GateRefused
from flows.runtime import pipeline
from flows.runtime.executor import Executor
from flows.runtime.loop import evaluation_contexts, train_steps
from flows.runtime.resolve_run import Source
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy, Ref

Planner = Callable[[RunContext, Source, Policy | None], list[Ref]]
"""Returns every result that a run consists of, as `plan_work` does."""


def plan_work(
    context: RunContext,
    source: Source,
    policy: Policy | None = None,
    executor: Callable[..., Executor] = Executor,
) -> list[Ref]:
    """Return every result that the run of `context` consists of, once, found or still to be computed.

    `policy` is the one to evaluate where one of the store was named. Of a run that ended because nothing was left to
    train on, or a rule refused it, those are the results up to there. `executor` makes the dry run of a context.
    """
    execute = executor(context=context)
    sets = [executor(context=each) for each in evaluation_contexts(context).values()]
    # A recorded run may have ended there; what it made up to that is the plan.
    with suppress(EmptyBatch, GateRefused):
        _run_all(context.config, source, execute, sets, policy)
    return unique_results(execute, *sets)


def unique_results(*executors: Executor) -> list[Ref]:
    """Return the results that executors were asked for, each once."""
    # Two evaluations list the same examples: one result with one key.
    return list({ref.key: ref for each in executors for _, ref in each.results}.values())


def _run_all(
    config: RunConfig, source: Source, execute: Executor, sets: Sequence[Executor], policy: Policy | None
) -> None:
    retries = config.evaluation.retry_errors
    if config.kind == "evaluate":
        tried = None if config.external else policy or pipeline.first_policy(execute, source)
        for each in sets:
            pipeline.evaluate(each, tried, retries)
        return
    due = sets if config.kind == "train" else ()
    if any(each.config.evaluation.every for each in due):
        _evaluate_due(due, pipeline.first_policy(execute, source), retries)
    for finished in train_steps(execute, source):
        _evaluate_due(due, finished.policy, retries)


def _evaluate_due(sets: Sequence[Executor], policy: Policy, retries: int) -> None:
    for each in sets:
        if each.config.evaluation.due(policy.version):
            pipeline.evaluate(each, policy, retries)

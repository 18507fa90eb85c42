"""plan_work: every result of a run, found in the ledger or still to be computed, by a dry run of its loop."""

from collections.abc import Callable, Iterator
from contextlib import suppress

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
    execute, config = executor(context=context), context.config
    sets = [executor(context=set_context) for set_context in evaluation_contexts(context).values()]

    def policies() -> Iterator[Policy | None]:
        if config.kind == "evaluate":
            yield None if config.external else policy or pipeline.first_policy(execute, source)
            return
        if config.kind == "train" and any(dry_run.config.evaluation.every for dry_run in sets):
            yield pipeline.first_policy(execute, source)
        for finished in train_steps(execute, source):
            yield finished.policy

    # A recorded run may have ended there; what it made up to that is the plan.
    with suppress(EmptyBatch, GateRefused):
        for tried in policies():
            for dry_run in sets if config.kind != "sft" else ():
                if config.kind == "evaluate" or (tried and dry_run.config.evaluation.due(tried.version)):
                    pipeline.evaluate(dry_run, tried, config.evaluation.retry_errors)
    return unique_results(execute, *sets)


def unique_results(*executors: Executor) -> list[Ref]:
    """Return the results that executors were asked for, each once."""
    # Two evaluations list the same examples: one result with one key.
    return list({ref.key: ref for execute in executors for _, ref in execute.results}.values())

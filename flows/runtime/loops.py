"""Runs an open session to its end: training, supervised training, evaluation.

Without Prefect, which a run whose work is all done does not need.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from typing import Any

from flows.runtime import pipeline
from flows.runtime.evaluation import Evaluations, evaluate_all
from flows.runtime.executor import Executor
from flows.runtime.pipeline import Ahead, StepBatch
from flows.runtime.session import Session
from flows.runtime.step_report import Outcome, check_account, finish_step


def loop_train(session: Session) -> dict[str, Any]:
    """Train with reinforcement learning; return what came of it as plain values."""
    config = session.config
    outcome = Outcome(session.context.run, config.steps)
    execute = Executor(session)
    with _thread("ahead") as threads, _thread("evaluation") as beside, ExitStack() as unfinished:
        # When this fails, threads that still sample end with their services; only then are they waited for.
        unfinished.callback(session.close)
        unfinished.callback(beside.shutdown, wait=False, cancel_futures=True)
        evaluations = Evaluations(session, beside)
        if config.evaluation.evaluates_training:
            evaluations.choose()
            evaluations.begin(pipeline.first_policy(execute, session.source))
        steps = pipeline.run_steps(execute, session.source, config, in_thread(threads), check_of(session))
        for finished in steps:
            outcome.add(finish_step(session, finished))
            outcome.policy = finished.policy
            evaluations.begin(finished.policy)
        evaluations.finish()
        unfinished.pop_all()
    outcome.evaluations, outcome.comparisons = evaluations.described, evaluations.comparisons()
    session.notify("comparison", rows=outcome.comparisons)
    return outcome.finished(session)


def loop_sft(session: Session) -> dict[str, Any]:
    """Train on demonstrations; return what came of it as plain values."""
    outcome = Outcome(session.context.run, session.config.steps)
    execute = Executor(session)
    for finished in pipeline.run_steps(execute, session.source, session.config, check=check_of(session)):
        outcome.add(finish_step(session, finished))
        outcome.policy = finished.policy
    return outcome.finished(session)


def loop_evaluate(session: Session) -> dict[str, Any]:
    """Score the policy that the config names, or else its model; return the scores as plain values."""
    external = session.config.external
    policy = None if external else session.policy or pipeline.first_policy(Executor(session), session.source)
    found = [each.described for each in evaluate_all(session, policy)]
    counts = {"num_computed": session.num_computed, "num_found": session.num_found}
    # The first set is told by itself, too, as most evaluations have no other.
    return {"policy_key": policy.key if policy else "", **found[0], "sets": found, **counts}


def _thread(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)


def check_of(session: Session) -> pipeline.Check:
    """Return the check of a step's accounts before training; what the ledger has was checked when it was made."""
    return lambda batch: check_account(session, batch) if any(ref.computed for ref in batch.refs) else None


def in_thread(threads: ThreadPoolExecutor) -> Ahead:
    """Return a way to build a batch ahead in a thread that knows the current flow run."""

    def ahead(build: Callable[[], StepBatch]) -> Callable[[], StepBatch]:
        return threads.submit(copy_context().run, build).result

    return ahead

"""Runs an open session of a replay to its end, or plans what it would compute."""

from contextlib import suppress
from typing import Any

from flows.orchestration.states import EmptyBatch, GateRefused
from flows.queries.step_history import step_history
from flows.replays.report import PolicyDistance, finish_replayed
from flows.replays.sources import going_through_source
from flows.replays.steps import quarantined_in, replay_steps
from flows.runtime.executor import Executor
from flows.runtime.loops import check_of, plan_work, unique_results
from flows.runtime.pipeline import Source
from flows.runtime.session import Session
from flows.runtime.step_report import Outcome
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy, Ref


def loop_replay(session: Session) -> dict[str, Any]:
    """Go through recorded steps again; return what came of it, beside what was recorded, as plain values."""
    config, store = session.config, session.context.store
    outcome, apart = Outcome(session.context.run, config.steps), PolicyDistance(store)
    recorded, quarantined = step_history(store, config.replay.run), quarantined_in(store, config.replay)
    steps = replay_steps(Executor(session), session.source, config, recorded, quarantined, check_of(session))
    with going_through_source(store, config), session.context.buffered():
        for done in steps:
            outcome.steps.append(finish_replayed(session, done, apart))
            outcome.policy = done.policy or outcome.policy
    return outcome.finished(session)


def plan_run(context: RunContext, source: Source, policy: Policy | None = None) -> list[Ref]:
    """Return every result that the run of `context` consists of, a replay or not, found or still to be computed."""
    return plan_replay(context, source) if context.config.kind == "replay" else plan_work(context, source, policy)


def plan_replay(context: RunContext, source: Source, policy: Policy | None = None) -> list[Ref]:
    """Return every result that the replay of `context` consists of, once; `policy` is of no use to a replay.

    Of one that a rule refused, those are the results up to there.
    """
    config, execute = context.config, Executor(context=context)
    recorded, quarantined = step_history(context.store, config.replay.run), quarantined_in(context.store, config.replay)
    with suppress(EmptyBatch, GateRefused):
        for _ in replay_steps(execute, source, config, recorded, quarantined):
            pass
    return unique_results(execute)

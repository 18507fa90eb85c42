"""Goes through a whole run, training, supervised training or evaluation: executes it, or plans its work.

Without Prefect, which a run whose work is all done does not need.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from contextvars import copy_context
from threading import Event
from typing import Any

from configs.algorithms import GrpoConfig
from configs.evaluation import EvaluationConfig
from configs.run import RunConfig
from configs.sections import ModelConfig
from configs.services import EngineConfig
from flows.orchestration.states import EmptyBatch, GateRefused
from flows.queries.scores import EvaluationScores, comparisons, score_rollouts
from flows.runtime import pipeline
from flows.runtime.executor import Executor
from flows.runtime.pipeline import Ahead, Begin, Build, Building
from flows.runtime.prepare import Source
from flows.runtime.session import Session
from flows.runtime.step_report import Outcome, check_account, finish_step
from flows.runtime.weights import WeightRetention
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy, Ref


def loop_train(session: Session) -> dict[str, Any]:
    """Train with reinforcement learning; return the result as plain values."""
    config = session.config
    outcome = Outcome(session.context.run, config.steps)
    execute = Executor(session)
    with (
        session.context.queue_commits(),
        _threads("ahead", 2) as threads,  # a batch is packed while the next one is sampled
        _threads("intake") as intakes,  # one: a step takes its groups from the stream when all before it have theirs
        _threads("evaluation") as beside,
        ExitStack() as unfinished,
    ):
        # When this fails, threads that still sample end with their services; only then are they waited for.
        unfinished.callback(session.close)
        unfinished.callback(beside.shutdown, wait=False, cancel_futures=True)
        evaluations = Evaluations(session, beside)
        if config.evaluation.evaluates_training:
            # Before any step is paid for.
            evaluations.choose()
            evaluations.begin(pipeline.first_policy(execute, session.source))
        ways = in_thread(threads), check_of(session), begin_in_thread(intakes), session.engine.expect
        steps = pipeline.run_steps(execute, session.source, *ways)
        retention = WeightRetention(session.context)
        for finished in steps:
            outcome.steps.append(finish_step(session, finished))
            outcome.policy = finished.policy
            evaluations.begin(finished.policy)
            retention.note(finished.policy, evaluations.waiting_keys)
        evaluations.finish()
        # All went well: the session ends its services itself, when its block ends.
        unfinished.pop_all()
    outcome.evaluations, outcome.comparisons = evaluations.described, evaluations.comparisons()
    # Last, as it compares the first policy with the last one.
    session.notify("comparison", rows=outcome.comparisons)
    return outcome.as_values(session)


def loop_sft(session: Session) -> dict[str, Any]:
    """Train on demonstrations; return the result as plain values."""
    outcome = Outcome(session.context.run, session.config.steps)
    execute, retention = Executor(session), WeightRetention(session.context)
    with session.context.queue_commits():
        for finished in pipeline.run_steps(execute, session.source, check=check_of(session)):
            outcome.steps.append(finish_step(session, finished))
            outcome.policy = finished.policy
            retention.note(finished.policy)
    return outcome.as_values(session)


def loop_evaluate(session: Session) -> dict[str, Any]:
    """Score the policy that the config names, or else its model; return the scores as plain values."""
    external = session.config.external
    policy = None if external else session.policy or pipeline.first_policy(Executor(session), session.source)
    found = [each.described for each in evaluate_all(session, policy)]
    counts = {"num_computed": session.num_computed, "num_found": session.num_found}
    # The first set is also given by itself, as most evaluations have no other.
    return {"policy_key": policy.key if policy else "", **found[0], "sets": found, **counts}


def _threads(name: str, number: int = 1) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=number, thread_name_prefix=name)


def check_of(session: Session) -> pipeline.Check:
    """Return the check of a step's accounts before training; what the ledger has was checked when it was made."""
    return lambda batch: check_account(session, batch) if any(ref.computed for ref in batch.refs) else None


def in_thread(threads: ThreadPoolExecutor) -> Ahead:
    """Return a way to build a batch ahead in a thread that knows the current flow run."""

    def ahead(build: Build) -> Building:
        left_engine = Event()
        # The current flow run is a context variable, and threads begin with empty contexts.
        batch = threads.submit(copy_context().run, build, left_engine.set)
        batch.add_done_callback(lambda _: left_engine.set())

        def wait_for_engine() -> None:
            left_engine.wait()
            if batch.done():
                batch.result()

        return Building(wait_for_engine, batch.result)

    return ahead


def begin_in_thread(threads: ThreadPoolExecutor) -> Begin:
    """Return a way to begin work in a thread that knows the current flow run."""
    return lambda work: threads.submit(copy_context().run, work).result


def evaluation_contexts(context: RunContext) -> dict[str, RunContext]:
    """Return the context in which each set of a run is evaluated, by its name; "" is the one without a name."""
    configs = evaluation_configs(context.config)
    return {name: RunContext(context.store, context.run, each, context.versions) for name, each in configs.items()}


def evaluation_configs(config: RunConfig) -> dict[str, RunConfig]:
    """Return what a run's config comes to in the evaluation of each set, by its name; "" is the one without a name."""
    return {name: _evaluating(config, each) for name, each in config.evaluation.of_sets().items()}


def _evaluating(config: RunConfig, evaluation: EvaluationConfig) -> RunConfig:
    """Return a config with the sampling settings of an evaluation; no teacher samples there.

    Every group is sampled to its end: scores of those that end first would be of the short ones.
    """
    # An environment's own would win over the evaluation's.
    own = {"temperature": None, "algorithm": None}
    environments = tuple(each.model_copy(update=own) for each in config.environments)
    rollout = config.rollout.model_copy(update={"temperature": evaluation.temperature})
    changed: dict[str, Any] = {"rollout": rollout, "environments": environments, "algorithm": GrpoConfig()}
    changed |= {"assignment": config.assignment.model_copy(update={"oversampling": 1.0})}
    changed |= {"evaluation": evaluation}
    if config.external:  # someone else's model asks no engine and no weights of ours
        changed |= {"engine": EngineConfig(), "model": ModelConfig()}
    return config.model_copy(update=changed)


def evaluate_all(session: Session, policy: Policy | None, version: int | None = None) -> list[EvaluationScores]:
    """Sample the held-out examples of every set with `policy`, None for someone else's model, and tell the watchers.

    `version` is of a policy that training has made, and takes the sets only that are due after so many steps.
    """
    contexts = evaluation_contexts(session.context)
    due = {name: each for name, each in contexts.items() if version is None or each.config.evaluation.due(version)}
    return [_evaluate(session, name, context, policy) for name, context in due.items()]


def _evaluate(session: Session, name: str, context: RunContext, policy: Policy | None) -> EvaluationScores:
    execute = Executor(session, context, label=name)
    rounds = pipeline.evaluate(execute, policy, context.config.evaluation.retry_errors)
    tables = [context.table("traces", (each,)) for each in rounds]
    passing = context.config.evaluation.pass_at, context.config.evaluation.pass_reward
    found = score_rollouts(name, policy.version if policy else 0, tables, context.config.environments, *passing)
    computed = any(each.computed for each in rounds)
    session.task_runs.finish_evaluation(found.described, computed)
    session.notify("evaluation", computed=computed, **found.described)
    return found


class Evaluations:
    """The evaluations of a training run, one after the other, beside its steps where `evaluation.overlap` says so.

    The policy just made is what the next step is drawn with: the engine serves both, and goes on to another policy when
    both are done with it. An evaluation that fails stops the run after the step under way, which is safe then.
    """

    def __init__(self, session: Session, threads: ThreadPoolExecutor) -> None:
        """`threads` is one thread: evaluations come in the order in which policies were made."""
        self._session = session
        self._overlaps = session.config.evaluation.overlap
        self._found: list[EvaluationScores] = []
        self._waiting: list[tuple[str, Future[list[EvaluationScores]]]] = []
        """Evaluations under way, with the keys of their policies."""
        self._threads = threads

    def choose(self) -> None:
        """Say which examples will be tried, before the first step: a set that cannot be made stops the run at once."""
        for name, context in evaluation_contexts(self._session.context).items():
            if any(map(context.config.evaluation.due, range(context.config.steps + 1))):
                pipeline.choose_held_out(Executor(self._session, context, label=name))

    def begin(self, policy: Policy) -> None:
        """Evaluate a policy on the sets that are due; raises what an earlier evaluation raised."""
        # Without waiting, but an evaluation that failed must not go unnoticed for the rest of the run.
        self._collect(Future.done)
        if not any(each.due(policy.version) for each in self._session.config.evaluation.of_sets().values()):
            return
        # Rollouts of an evaluation are committed by themselves, and not before the policy that they are of.
        self._session.context.flush()
        if self._overlaps:
            scores = self._threads.submit(copy_context().run, evaluate_all, self._session, policy, policy.version)
            self._waiting.append((policy.key, scores))
        else:
            self._found += evaluate_all(self._session, policy, policy.version)

    def finish(self) -> None:
        """Wait for all evaluations; raises what one of them raised."""
        self._collect(lambda each: True)

    @property
    def waiting_keys(self) -> set[str]:
        """Keys of the policies whose evaluations are under way."""
        return {key for key, _ in self._waiting}

    @property
    def described(self) -> list[dict[str, Any]]:
        """What was found, in the order in which policies were made."""
        return [each.described for each in self._found]

    def comparisons(self) -> list[dict[str, Any]]:
        """Return how the last policy of each set differs from the first."""
        return comparisons(self._found)

    def _collect(self, ready: Callable[[Future[list[EvaluationScores]]], bool]) -> None:
        # In the order in which policies were made: results are shown and compared in it.
        while self._waiting and ready(self._waiting[0][1]):
            self._found += self._waiting.pop(0)[1].result()


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
    due = [each for each in sets if config.kind == "train" and each.config.evaluation.every]
    if due:
        _evaluate_due(due, pipeline.first_policy(execute, source), retries)
    for finished in pipeline.run_steps(execute, source):
        _evaluate_due(due, finished.policy, retries)


def _evaluate_due(sets: Sequence[Executor], policy: Policy, retries: int) -> None:
    for each in sets:
        if each.config.evaluation.due(policy.version):
            pipeline.evaluate(each, policy, retries)

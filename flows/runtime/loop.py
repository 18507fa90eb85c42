"""loop_train, loop_sft, loop_evaluate: a whole run of an open session, from its first policy to its outcome.

`train_steps` is the one loop of all training, whatever the lag between sampling and training, and of dry runs. It owns
the threads that build batches ahead and the queue of rollouts. It runs in the thread of the flow; without Prefect where
every result is cached.
"""

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from functools import partial
from typing import Any

from configs.algorithms import GrpoConfig
from configs.evaluation import EvaluationConfig
from configs.run import RunConfig
from configs.sections import ModelConfig
from configs.services import EngineConfig
from flows.queries.scores import EvaluationScores, comparisons, score_rollouts
from flows.runtime import pipeline
from flows.runtime.executor import Executor
from flows.runtime.pending_batch import PendingBatch
from flows.runtime.policy_retention import WeightRetention
from flows.runtime.records import FinishedStep
from flows.runtime.resolve_run import Source
from flows.runtime.rollouts import RolloutSource
from flows.runtime.session import Session
from flows.runtime.step_report import Outcome, finish_step
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy


def train_steps(execute: Executor, source: Source, prefetch: bool = False) -> Generator[FinishedStep]:
    """Run all steps of the executor's config and yield each finished one.

    As soon as policy v exists it samples the batches up to step v + lag, the lag being `rollout.max_off_policy_steps`.
    With lag 0 the stages run in turn. With 1 the batch of step k + 1 is sampled with the policy that step k trains,
    while it trains. With more, steps share a queue: each takes the groups that end first, all of them sampled at most
    lag policies before, and `rollout.stale` says whether a step waits for groups that are due.

    With `prefetch` threads build the batches ahead; plans and dry runs build each when its step needs it. A gate stops
    the training, while sampling continues to the lag. Raises EmptyBatch where a step has nothing to train on.
    """
    config, lag = execute.config, execute.config.rollout.max_off_policy_steps
    examples, policy = pipeline.import_sources(execute, source)
    pending: list[PendingBatch] = []

    def look_ahead(step: int) -> None:
        steps = range(len(pending), min(step + lag + 1, config.steps))
        rollouts.add(steps, policy)
        for later in steps:
            build = partial(pipeline.build_batch, rollouts, later, policy, pending[-1] if pending else None)
            pending.append(PendingBatch(build, pool))

    # Two threads: a batch is packed while the next one is sampled.
    with _threads("ahead", 2) as threads, closing(RolloutSource(execute, examples)) as rollouts:
        pool = threads if prefetch and lag else None
        try:
            look_ahead(0)
            for step in range(config.steps):
                with rollouts.learner_waits():
                    batch = pending[step].result()
                finished = pipeline.train_step(execute, step, batch, policy)
                policy = finished.policy
                try:
                    look_ahead(step + 1)
                    if lag == 1 and step + 1 < config.steps:
                        # Before the step is yielded: its consumer may ask the engine for another policy.
                        pending[step + 1].wait_for_engine()
                except Exception:  # whatever it is: the step is trained, and reported before the run ends by it
                    yield finished
                    raise
                yield finished
        except BaseException:  # Ctrl-C too: threads that sample end with the services, and only then are waited for
            execute.abort()
            raise


def loop_train(session: Session) -> dict[str, Any]:
    """Train with reinforcement learning; return the result as plain values."""
    config = session.config
    outcome = Outcome(session.context.run, config.steps)
    execute = Executor(session)
    with (
        session.context.queue_commits(),
        _threads("evaluation", 1) as threads,
        closing(train_steps(execute, session.source, prefetch=True)) as steps,
    ):
        try:
            evaluations = Evaluations(session, threads)
            if config.evaluation.evaluates_training:
                # Before any step is paid for.
                evaluations.choose()
                evaluations.begin(pipeline.first_policy(execute, session.source))
            retention = WeightRetention(session.context)
            for finished in steps:
                outcome.steps.append(finish_step(session, finished))
                outcome.policy = finished.policy
                evaluations.begin(finished.policy)
                retention.note(finished.policy, evaluations.waiting_keys)
            evaluations.finish()
        except BaseException:  # Ctrl-C too: an evaluation under way ends with its services
            threads.shutdown(wait=False, cancel_futures=True)
            session.close()
            raise
    outcome.evaluations, outcome.comparisons = evaluations.described, evaluations.comparisons()
    # Last, as it compares the first policy with the last one.
    session.notify("comparison", rows=outcome.comparisons)
    return outcome.as_values(session)


def loop_sft(session: Session) -> dict[str, Any]:
    """Train on demonstrations; return the result as plain values."""
    outcome = Outcome(session.context.run, session.config.steps)
    execute, retention = Executor(session), WeightRetention(session.context)
    with session.context.queue_commits():
        for finished in train_steps(execute, session.source):
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


def _threads(name: str, count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=count, thread_name_prefix=name)


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

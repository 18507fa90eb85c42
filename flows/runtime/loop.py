"""loop_train, loop_evaluate, plan_work: a whole run of an open session, from first policy to outcome, or its dry run.

`train_steps` is the one loop of all training, whatever the lag between sampling and training, and of dry runs. It owns
the threads that build batches ahead and the queue of rollouts. It runs in the thread of the flow; without Prefect where
every result is cached.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from contextvars import copy_context
from functools import cache, partial
from typing import Any

from configs.algorithms import GrpoConfig
from configs.run import RunConfig
from configs.sections import ModelConfig
from configs.services import EngineConfig
from flows.orchestration.states import EmptyBatch, GateRefused
from flows.queries.scores import EvaluationScores, comparisons, score_rollouts
from flows.runtime import pipeline
from flows.runtime.executor import Executor, FinishedStep, RolloutSource, StepBatch
from flows.runtime.policy_retention import WeightRetention
from flows.runtime.resolve_run import Source
from flows.runtime.session import Session
from flows.runtime.step_report import DescribedSteps, JsonObject, finish_step, run_outcome
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy, Ref

Planner = Callable[[RunContext, Source, Policy | None], list[Ref]]
"""Returns every result that a run consists of, as `plan_work` does."""


def train_steps(execute: Executor, source: Source, prefetch: bool = False) -> Generator[FinishedStep]:
    """Run all steps of the executor's config, of a fork those from its policy on, and yield each finished one.

    As soon as policy v exists it samples the batches up to step v + lag, the lag being `rollout.max_off_policy_steps`.
    With lag 0 the stages run in turn. With 1 the batch of step k + 1 is sampled with the policy that step k trains,
    while it trains. With more, steps share a queue: each takes the groups that end first, all of them sampled at most
    lag policies before, and `rollout.stale` says whether a step waits for groups that are due.

    With `prefetch` a thread builds the batches ahead, one after the other; plans and dry runs build each when its step
    needs it. A gate stops the training, while sampling continues to the lag. Raises EmptyBatch where a step has nothing
    to train on.
    """
    config, lag = execute.config, execute.config.rollout.max_off_policy_steps
    examples, policy = pipeline.import_sources(execute, source)
    first, pending = policy.version, dict[int, Callable[[], StepBatch]]()

    def batch_of(step: int) -> StepBatch:
        return pending[step]()

    def look_ahead(step: int) -> None:
        steps = range(max(pending, default=first - 1) + 1, min(step + lag + 1, config.steps))
        rollouts.add(steps, policy)
        pending.pop(step - 2, None)
        for later in steps:
            # By number: a chain of functions would hold the batches of all steps.
            before = partial(batch_of, later - 1) if later > first else None
            build = partial(pipeline.build_batch, rollouts, later, policy, before)
            # A thread starts with an empty context, and the current flow run is a context variable.
            pending[later] = pool.submit(copy_context().run, build).result if pool else cache(build)

    rollouts = RolloutSource(execute, examples, source.pair_inputs)
    with ThreadPoolExecutor(1, "ahead") as threads, closing(rollouts):
        pool = threads if prefetch and lag else None
        try:
            look_ahead(first)
            for step in range(first, config.steps):
                # The time for the load of the queue's sampler.
                with rollouts.queue.meter.learner_waits() if rollouts.queue else nullcontext():
                    batch = pending[step]()
                finished = pipeline.train_step(execute, step, batch, policy)
                policy = finished.policy
                try:
                    look_ahead(step + 1)
                    if lag == 1 and step + 1 < config.steps:
                        # Before the step is yielded: its consumer may ask the engine for another policy.
                        pending[step + 1]()
                except Exception:  # whatever it is: the step is trained, and reported before the run ends by it
                    yield finished
                    raise
                yield finished
        except BaseException:  # Ctrl-C too: threads that sample end with the services, and only then are waited for
            execute.abort()
            raise


def loop_train(session: Session) -> JsonObject:
    """Train with reinforcement learning or on demonstrations, as the run's kind says; return the result as values."""
    config = session.config
    described = DescribedSteps()
    policy: Policy | None = None
    execute, retention = Executor(session), WeightRetention(session.context)
    with (
        session.context.queue_commits(),
        ThreadPoolExecutor(1, "evaluation") as threads,
        closing(train_steps(execute, session.source, prefetch=config.kind == "train")) as steps,
    ):
        try:
            evaluations = Evaluations(session, threads)
            evaluations.choose(execute)
            for finished in steps:
                described.append(finish_step(session, finished, described.last))
                policy = finished.policy
                evaluations.begin(policy)
                retention.note(policy, {key for key, _ in evaluations.waiting})
            evaluations.collect()
        except BaseException:  # Ctrl-C too: an evaluation under way ends with its services
            threads.shutdown(wait=False, cancel_futures=True)
            session.close()
            raise
    scores = evaluations.scores
    rows = comparisons(scores)
    return run_outcome(session, described.unpack(), policy, [score.described for score in scores], rows)


def loop_evaluate(session: Session) -> JsonObject:
    """Score the policy that the config names, or else its model; return the scores as plain values."""
    external = session.config.external
    policy = None if external else session.policy or pipeline.first_policy(Executor(session), session.source)
    sets = [scores.described for scores in evaluate_sets(session, evaluation_contexts(session.context), policy)]
    # The first set is also given by itself, as most evaluations have no other.
    outcome = {"policy_key": policy.key if policy else "", **sets[0], "sets": sets}
    return outcome | {"num_computed": session.num_computed, "num_found": session.num_found}


def evaluation_contexts(context: RunContext) -> dict[str, RunContext]:
    """Return the context in which each set of a run is evaluated, by its name; "" is the one without a name."""
    configs = evaluation_configs(context.config)
    return {name: RunContext(context.store, context.run, each, context.versions) for name, each in configs.items()}


def evaluation_configs(config: RunConfig) -> dict[str, RunConfig]:
    """Return what a run's config comes to in the evaluation of each set, by its name; "" is the one without a name.

    No teacher samples there. Every group is sampled to its end: scores of those that end first would be of short ones.
    An environment that is never trained on is in the sets that name it alone, so that nothing else is in their keys.
    """
    tables = {table.name: table.environment for table in config.evaluation.tables.values() if table.taskset}
    changes: dict[str, Any] = {"algorithm": GrpoConfig()}
    changes["assignment"] = config.assignment.model_copy(update={"oversampling": 1.0})
    changes["training"] = config.training.model_copy(update={"router_replay": "off"})  # nothing is trained on them
    if config.external:  # an external model needs no engine and no weights
        changes |= {"engine": EngineConfig(), "model": ModelConfig()}
    configs = {}
    for name, evaluation in config.evaluation.of_sets().items():
        own = evaluation.own_sampling
        # An environment's own settings would win over the evaluation's.
        update = {**dict.fromkeys(own), "algorithm": None}
        named = [tables[entry] for entry in evaluation.environments if entry in tables]
        trained = () if named and len(named) == len(evaluation.environments) else config.environments
        changes["environments"] = tuple(entry.model_copy(update=update) for entry in (*trained, *named))
        rollout = config.rollout.model_copy(update=own)
        configs[name] = config.model_copy(update={**changes, "rollout": rollout, "evaluation": evaluation})
    return configs


def evaluate_sets(
    session: Session, contexts: Mapping[str, RunContext], policy: Policy | None
) -> list[EvaluationScores]:
    """Sample the held-out examples of some sets with `policy`, None for an external model, and tell the watchers."""
    every = []
    for name, context in contexts.items():
        evaluation = context.config.evaluation
        rounds = pipeline.evaluate(Executor(session, context, label=name), policy, evaluation.retry_errors)
        tables = [context.table("traces", (ref,)) for ref in rounds]
        passing = evaluation.pass_at, evaluation.pass_reward
        scores = score_rollouts(name, policy.version if policy else 0, tables, context.config.environments, *passing)
        computed = any(ref.computed for ref in rounds)
        session.notify("evaluation", computed=computed, **scores.described)
        every.append(scores)
    return every


class Evaluations:
    """The evaluations of a training run, sequentially; next to its steps where `evaluation.overlap` says so.

    The policy just made samples the next step too: the engine serves both, and loads another policy when both are done
    with it. An evaluation that fails stops the run after the current step, which is safe then.
    """

    def __init__(self, session: Session, threads: ThreadPoolExecutor) -> None:
        """`threads` is one thread: evaluations come in the order in which policies were made."""
        self._session, self._threads = session, threads
        contexts = evaluation_contexts(session.context)
        self._sets = {name: context for name, context in contexts.items() if context.config.evaluation.every}
        self.scores: list[EvaluationScores] = []
        """In the order in which policies were made, and of each policy in the order of the sets."""
        self.waiting: list[tuple[str, Future[list[EvaluationScores]]]] = []
        """Running evaluations, with the keys of their policies."""

    def choose(self, execute: Executor) -> None:
        """Choose the examples of every set and evaluate the first policy, before any step is paid for."""
        for name, context in self._sets.items():
            if any(map(context.config.evaluation.due, range(context.config.steps + 1))):
                pipeline.choose_held_out(Executor(self._session, context, label=name))
        if self._sets:
            self.begin(pipeline.first_policy(execute, self._session.source))

    def begin(self, policy: Policy) -> None:
        """Evaluate a policy on the sets that are due; raises what an earlier evaluation raised."""
        # Without waiting, but an evaluation that failed must not go unnoticed for the rest of the run.
        self.collect(wait=False)
        due = {name: each for name, each in self._sets.items() if each.config.evaluation.due(policy.version)}
        if not due:
            return
        # Rollouts of an evaluation are committed by themselves, and not before the policy that they are of.
        self._session.context.flush()
        scores = self._threads.submit(copy_context().run, evaluate_sets, self._session, due, policy)
        self.waiting.append((policy.key, scores))
        if not self._session.config.evaluation.overlap:
            self.collect()

    def collect(self, wait: bool = True) -> None:
        """Take the scores of the evaluations that have ended, with `wait` of all; raises what one of them raised."""
        while self.waiting and (wait or self.waiting[0][1].done()):
            self.scores += self.waiting.pop(0)[1].result()


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
        if any(dry_run.config.evaluation.every for dry_run in sets):
            yield pipeline.first_policy(execute, source)
        for finished in train_steps(execute, source):
            yield finished.policy

    # A recorded run may have ended there; what it made up to that is the plan.
    with suppress(EmptyBatch, GateRefused):
        for tried in policies():
            for dry_run in sets:
                if config.kind == "evaluate" or (tried and dry_run.config.evaluation.due(tried.version)):
                    pipeline.evaluate(dry_run, tried, config.evaluation.retry_errors)
    return unique_results(execute, *sets)


def unique_results(*executors: Executor) -> list[Ref]:
    """Return the results that executors were asked for, each once."""
    # Two evaluations list the same examples: one result with one key.
    return list({ref.key: ref for execute in executors for _, ref in execute.results}.values())

"""Evaluates policies on sets of held-out examples, at once or beside the next step of training.

Each set has a config of its own, so that the keys of its results know no other set.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from configs.algorithms import GrpoConfig
from configs.evaluation import EvaluationConfig
from configs.run import RunConfig
from configs.sections import ModelConfig
from configs.services import EngineConfig
from flows.queries.scores import EvaluationScores, comparisons, score_rollouts
from flows.runtime import pipeline
from flows.runtime.executor import Executor
from flows.runtime.session import Session
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy


def evaluation_contexts(context: RunContext) -> dict[str, RunContext]:
    """Return the context in which each set of a run is evaluated, by its name; "" is the one without a name."""
    return {name: _with(context, each) for name, each in evaluation_configs(context.config).items()}


def evaluation_configs(config: RunConfig) -> dict[str, RunConfig]:
    """Return what a run's config comes to in the evaluation of each set, by its name; "" is the one without a name."""
    return {name: _evaluating(config, each) for name, each in config.evaluation.of_sets().items()}


def _with(context: RunContext, config: RunConfig) -> RunContext:
    return RunContext(context.store, context.run, config, context.versions)


def _evaluating(config: RunConfig, evaluation: EvaluationConfig) -> RunConfig:
    """Return a config with the sampling settings of an evaluation; no teacher samples there.

    Every group is sampled to its end: scores of those that end first would be of the short ones.
    """
    own = {"temperature": None, "algorithm": None}
    environments = tuple(each.model_copy(update=own) for each in config.environments)
    rollout = config.rollout.model_copy(update={"temperature": evaluation.temperature})
    changed: dict[str, Any] = {"rollout": rollout, "environments": environments, "algorithm": GrpoConfig()}
    changed |= {"assignment": config.assignment.model_copy(update={"oversampling": 1.0})}
    changed |= {"evaluation": evaluation} | _without_engine(config)
    return config.model_copy(update=changed)


def _without_engine(config: RunConfig) -> dict[str, Any]:
    """Return what an evaluation of someone else's model leaves open: it asks no engine and no weights of ours."""
    return {"engine": EngineConfig(), "model": ModelConfig()} if config.external else {}


def evaluate_all(session: Session, policy: Policy | None, version: int | None = None) -> list[EvaluationScores]:
    """Sample the held-out examples of every set with `policy`, None for someone else's model, and tell the watchers.

    `version` is of a policy that training has made, and takes the sets only that are due after so many steps.
    """
    contexts = evaluation_contexts(session.context)
    due = {name: each for name, each in contexts.items() if version is None or each.config.evaluation.due(version)}
    return [_evaluate(session, name, context, policy) for name, context in due.items()]


def _evaluate(session: Session, name: str, context: RunContext, policy: Policy | None) -> EvaluationScores:
    rounds = pipeline.evaluate(Executor(session, context), policy, context.config.evaluation.retry_errors)
    tables = [context.table("traces", (each,)) for each in rounds]
    pass_at = context.config.evaluation.pass_at
    found = score_rollouts(name, policy.version if policy else 0, tables, context.config.environments, pass_at)
    session.notify("evaluation", computed=any(each.computed for each in rounds), **found.described)
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
        self._waiting: list[Future[list[EvaluationScores]]] = []
        self._threads = threads

    def choose(self) -> None:
        """Say which examples will be tried, before the first step: a set that cannot be made stops the run at once."""
        for context in evaluation_contexts(self._session.context).values():
            if any(map(context.config.evaluation.due, range(context.config.steps + 1))):
                pipeline.held_out(Executor(self._session, context))

    def begin(self, policy: Policy) -> None:
        """Evaluate a policy on the sets that are due; raises what an earlier evaluation raised."""
        self._collect(lambda each: each.done())
        if not any(each.due(policy.version) for each in self._session.config.evaluation.of_sets().values()):
            return
        if self._overlaps:
            self._waiting.append(
                self._threads.submit(copy_context().run, evaluate_all, self._session, policy, policy.version)
            )
        else:
            self._found += evaluate_all(self._session, policy, policy.version)

    def finish(self) -> None:
        """Wait for all evaluations; raises what one of them raised."""
        self._collect(lambda each: True)

    @property
    def described(self) -> list[dict[str, Any]]:
        """What was found, in the order in which policies were made."""
        return [each.described for each in self._found]

    def comparisons(self) -> list[dict[str, Any]]:
        """Return how the last policy of each set differs from the first."""
        return comparisons(self._found)

    def _collect(self, ready: Callable[[Future[list[EvaluationScores]]], bool]) -> None:
        while self._waiting and ready(self._waiting[0]):
            self._found += self._waiting.pop(0).result()

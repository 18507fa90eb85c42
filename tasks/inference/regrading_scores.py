"""Scoring recorded traces with an environment's reward functions of today; imports verifiers and the environment."""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.v1.env import Env
from verifiers.v1.judge import Judge
from verifiers.v1.task import Task
from verifiers.v1.utils.decorators import discover_decorated
from verifiers.v1.utils.loaders import load_environment

from tasks.inference.environment_config import resolved
from tasks.inference.regrading import NotRegradable
from tasks.inference.regrading_episodes import EpisodeScores
from tasks.inference.regrading_traces import Loader
from tasks.inference.rows import Row

MOST_AT_ONCE = 64
"""Episodes whose reward functions are under way at once."""
ADVICE = "Nothing was scored; what was recorded is as it was."


class Grader:
    """One environment, loaded, and what it says about recorded traces."""

    def __init__(self, environment: Mapping[str, Any]) -> None:
        """Load the environment of a config section, as plain values; raises what its package raises."""
        self.name = environment["name"]
        self.env = load_environment(resolved(environment))
        self.loader = Loader(self.env, self._refuse)
        self.compares = type(self.env).finalize is not Env.finalize
        self.refusal = ""
        """Why this environment cannot be regraded; empty as long as nothing has been found."""
        _forbid_judges(self._refuse)
        declared = self._bare(None, type(self.env.taskset).task_type())
        for kind in ("reward", "metric"):
            declared.hooks(kind)  # a function that is plugged in and cannot be loaded is no fault of any trace

    async def score(
        self,
        examples: Sequence[Row],
        traces: Sequence[Row],
        messages: Sequence[Row],
        working: Callable[[], None] = lambda: None,
    ) -> list[Row]:
        """Return a row of SCORES for each trace that is not errored, in order; `working` is called now and then.

        Traces of one episode are scored each for itself and then compared, as in a rollout. Raises NotRegradable.
        """
        self.refusal = ""
        tasks = {row["example_id"]: row["task"] for row in examples}
        own: dict[str, list[Row]] = {row["trace_id"]: [] for row in traces}
        episodes: dict[str, list[Row]] = {}
        for row in messages:
            own[row["trace_id"]].append(row)
        for row in traces:
            episodes.setdefault(row["episode_id"], []).append(row)
        limit = asyncio.Semaphore(MOST_AT_ONCE)

        async def one(rows: list[Row]) -> list[Row]:
            async with limit:
                task = json.loads(tasks.get(rows[0]["example_id"], "null"))
                scored = await EpisodeScores(self, rows, own, task).score()
                working()
                return scored

        found = await asyncio.gather(*map(one, episodes.values()))
        if self.refusal:
            raise NotRegradable(self.refusal)
        by_trace = {row["trace_id"]: row for rows in found for row in rows}
        return [by_trace[row["trace_id"]] for row in traces if row["error_class"] is None]

    def task_of(self, data: Any, declared: type[Task[Any]]) -> Task[Any]:
        """Return the behaviour for a task's data; raises NotRegradable where its scores need more than a trace."""
        task = self._bare(data, declared)
        if judges := task.plugged_judges():
            self._refuse(f"judge {judges[0].reward_name!r} asks a model")
        for hook in task.hooks("reward"):
            if needs_runtime(hook):
                self._refuse(f"reward {hook.__name__!r} needs the rollout's runtime")
        return task

    def _bare(self, data: Any, declared: type[Task[Any]]) -> Task[Any]:
        task = object.__new__(declared)
        config = self.env.config.taskset.task
        # A task that an environment makes for itself may take more than data; what scores a trace needs no more.
        Task.__init__(task, data, config if isinstance(config, declared.config_type()) else None)
        return task

    def kept_metrics(self, task: Task[Any], recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recorded metrics that only a rollout can measure: the harness's, and those of its runtime."""
        hooks = [hook for hook in task.hooks("metric") if needs_runtime(hook)]
        for harness in self.env._harnesses.values():
            hooks += discover_decorated(harness, "metric")
        return {hook.__name__: recorded[hook.__name__] for hook in hooks if hook.__name__ in recorded}

    def _refuse(self, why: str) -> None:
        self.refusal = self.refusal or f"environment {self.name!r} cannot be regraded: {why}. {ADVICE}"
        raise NotRegradable(self.refusal)


def _forbid_judges(refuse: Callable[[str], None]) -> None:
    """Let no judge of this process ask a model; one that a reward function calls is known only when it is called."""

    async def complete(judge: Judge[Any, Any], *_: Any, **__: Any) -> None:
        refuse(f"judge {judge.reward_name!r} asks a model")

    Judge.complete = complete


def needs_runtime(hook: Callable[..., Any]) -> bool:
    """Whether a reward or metric cannot be called without a runtime."""
    asked = inspect.signature(hook).parameters.get("runtime")
    return asked is not None and asked.default is inspect.Parameter.empty

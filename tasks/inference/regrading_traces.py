"""Recorded traces as verifiers has them while it scores: typed by the environment's own task, without its state."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.env import Env
from verifiers.v1.state import state_cls
from verifiers.v1.task import Task
from verifiers.v1.trace import Trace

from tasks.inference.rows import Row, rebuild

MakeTask = Callable[[Any, type[Task[Any]]], Task[Any]]


class StateNotRecorded:
    """Stands where a rollout kept its state, which no record has; refuses whoever looks at it."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self._refuse = refuse

    def __getattr__(self, name: str) -> None:
        if not name.startswith("__"):
            self._refuse(f"its scores look at the rollout's state ({name!r}), which is not recorded")
        raise AttributeError(name)


class Loader:
    """Puts traces of one environment together again."""

    def __init__(self, env: Env[Any], refuse: Callable[[str], None]) -> None:
        self._declared: type[Task[Any]] = type(env.taskset).task_type()
        self._refuse = refuse

    def load(
        self, row: Row, messages: Sequence[Row], dispatched: Row | None, make: MakeTask
    ) -> tuple[Task[Any], Trace[Any, Any, Any]]:
        """Return a recorded trace and the task that scores it.

        `dispatched` is the example's data; it stands in where the record does not hold the task. Raises pydantic's
        ValidationError where the environment's task of today does not take the recorded data.
        """
        record = rebuild(row, messages) or self._minimal(row, messages, dispatched)
        behaviour = self._behaviour(record["task"]["type"])
        schema = Trace[behaviour.data_type(), state_cls(behaviour), WireAgentConfig]
        trace = schema.model_validate(record)
        trace.__dict__["state"] = StateNotRecorded(self._refuse)
        return make(trace.task.data, behaviour), trace

    def dispatched(self, data: Row | None, make: MakeTask) -> Task[Any]:
        """Return the task that the environment was given to play."""
        if data is None:
            raise ValueError("the example of this rollout is not in the examples table")
        return make(self._declared.data_type().model_validate(data), self._declared)

    def _behaviour(self, name: str) -> type[Task[Any]]:
        """Return the task class of a recorded name: an environment may make tasks of its own for some agents."""
        if name == self._declared.__name__:
            return self._declared
        return next((each for each in _subclasses(Task) if each.__name__ == name), self._declared)

    def _minimal(self, row: Row, messages: Sequence[Row], dispatched: Row | None) -> Row:
        """Return the record of a trace that came without one: its messages, and the example's task."""
        if dispatched is None:
            raise ValueError("neither the trace's record nor the examples table holds the task")
        record = {
            "task": {"type": self._declared.__name__, "data": dispatched},
            "agent": {"config": {}, "name": row["agent"], "trainable": row["trainable"]},
            "nodes": [{} for _ in messages],
            "is_completed": True,
            "ok": True,
            "stop_condition": row["stop_condition"],
        }
        return rebuild({**row, "record": json.dumps(record)}, messages)


def _subclasses(of: type[Task[Any]]) -> Iterator[type[Task[Any]]]:
    for each in of.__subclasses__():
        yield each
        yield from _subclasses(each)

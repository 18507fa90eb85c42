"""The process that grades for one environment: `tasks/inference/environments/host.py` with `--grade`.

It loads the environment, binds a free loopback port and writes `{"address": ...}` to the report file. A client connects
with the key of STAGECOACH_GRADER_KEY and names a directory with examples, traces and messages as Arrow files; their
scores are written beside them. Graders are processes of their own because they import the environment's package.

With `--grade groups` rollouts keep their own rewards, and only their groups are scored.

A trace whose scoring fails gets an error in its row, as in a rollout. So does one whose scores need what is not
recorded: NeedsRuntime for a living sandbox, StateNotRecorded for a state that its record does not have. Judges are
asked, as in a rollout.
"""

import asyncio
import inspect
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pyarrow as pa
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.env import Env
from verifiers.v1.episode import EnvInfo, Episode
from verifiers.v1.errors import EnvError, boundary
from verifiers.v1.state import state_cls
from verifiers.v1.task import Task
from verifiers.v1.trace import Trace, TraceTask
from verifiers.v1.utils.decorators import discover_decorated
from verifiers.v1.utils.loaders import load_environment

from tasks.inference.engine.host import write_report
from tasks.inference.environments.examples import verifiers_config
from tasks.inference.environments.servers import read_rows, write_rows
from tasks.inference.grading.client import KEY_VARIABLE, SCORES
from tasks.inference.grading.groups import score_groups
from tasks.inference.trace_rows.failures import Failure, failure_of_exception, failure_of_rewards
from tasks.inference.trace_rows.rows import Row, compact_json, error_columns, rebuild
from tasks.runtime.imports import load_function

ROWS = ("examples", "traces", "messages")
SCORING_SECONDS = 300.0
"""Time limit for scoring one trace, or comparing those of an episode, where the task sets none."""
MAX_CONCURRENT_EPISODES = 64
"""Episodes that are scored at once: enough to keep reward functions that wait for a network busy."""
LOST = Failure("environment", "GraderLost", "a group reward ended its process twice, or never returned; see its log")


class Grader:
    """One loaded environment that scores recorded traces."""

    def __init__(self, environment: Mapping[str, Any]) -> None:
        """Load the environment of a config section (plain values); raises what its package raises."""
        self.name = environment["name"]
        self.env = load_environment(verifiers_config(environment))
        self.declared: type[Task[Any]] = type(self.env.taskset).task_type()
        self.rewards_groups = bool(environment["group_rewards"])
        self.compares = type(self.env).finalize is not Env.finalize
        declared = self.task_of(None, self.declared)
        # Raises now for a plugged-in function that cannot be loaded: that is no fault of a trace.
        for kind in ("reward", "metric"):
            declared.hooks(kind)

    async def score(
        self,
        examples: Sequence[Row],
        traces: Sequence[Row],
        messages: Sequence[Row],
        report_progress: Callable[[], None] = lambda: None,
    ) -> list[Row]:
        """Return each trace without an error with the columns of SCORES, in order of the episodes.

        `report_progress` is called after each episode. Traces of one episode are scored one by one and then compared,
        as in a rollout.
        """
        # All messages are sorted to their traces once: a filter for each trace would read the table as often.
        tasks = {row["example_id"]: row["task"] for row in examples}
        by_trace: dict[str, list[Row]] = {row["trace_id"]: [] for row in traces}
        episodes: dict[str, list[Row]] = {}
        for row in messages:
            by_trace[row["trace_id"]].append(row)
        for row in traces:
            episodes.setdefault(row["episode_id"], []).append(row)
        limit = asyncio.Semaphore(MAX_CONCURRENT_EPISODES)

        async def score_episode(rows: list[Row]) -> list[Row]:
            async with limit:
                task = json.loads(tasks.get(rows[0]["example_id"], "null"))
                scored = await EpisodeScores(self, rows, by_trace, task).score()
                report_progress()
                return scored

        scores = await asyncio.gather(*map(score_episode, episodes.values()))
        return [row for rows in scores for row in rows]

    def task_of(self, data: Any, declared: type[Task[Any]]) -> Task[Any]:
        """Return a task of class `declared`."""
        task = object.__new__(declared)
        config = self.env.config.taskset.task
        # The __init__ of a task class may take more arguments than data and config; scoring needs no more than these.
        Task.__init__(task, data, config if isinstance(config, declared.config_type()) else None)
        return task

    def load(
        self, row: Row, messages: Sequence[Row], note: Callable[[Failure], None]
    ) -> tuple[Task[Any], Trace[Any, Any, Any]]:
        """Return a recorded trace, which calls `note` where a state is read that it does not have, and its task.

        Raises ValueError for a row without a record, pydantic's ValidationError where the environment's current task
        class rejects the recorded data.
        """
        record = rebuild(row, messages)
        if not record:
            raise ValueError("the row holds no record of its trace, and so no task to score it by")
        # An environment may make tasks of its own for some agents.
        classes = {kind.__name__: kind for kind in [*_subclasses(Task), self.declared]}
        task_class = classes.get(record["task"]["type"], self.declared)
        schema = Trace[task_class.data_type(), state_cls(task_class), WireAgentConfig]
        trace = schema.model_validate(record)
        if "state" not in record:
            # Past pydantic, which would refuse it as the state of this class.
            trace.__dict__["state"] = AbsentState(note)
        return self.task_of(trace.task.data, task_class), trace

    def recorded_metrics(self, task: Task[Any], recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recorded metrics that only a rollout can measure: those of the harness and the runtime."""
        hooks = [hook for hook in task.hooks("metric") if needs_runtime(hook)]
        for harness in self.env._harnesses.values():
            hooks += discover_decorated(harness, "metric")
        return {hook.__name__: recorded[hook.__name__] for hook in hooks if hook.__name__ in recorded}


def needs_runtime(hook: Callable[..., Any]) -> bool:
    """Tell whether a reward, a metric or a judge's score cannot be called without a runtime."""
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def runtime_rewards(task: Task[Any]) -> list[str]:
    """Return the names of a task's rewards, judges among them, that verifiers skips where there is no runtime."""
    rewards = {hook.__name__: hook for hook in task.hooks("reward")}
    judges = {judge.reward_name: judge.score for judge in task.plugged_judges()}
    return [name for name, function in (rewards | judges).items() if needs_runtime(function)]


@dataclass
class EpisodeScores:
    """Scores the rebuilt traces of one episode."""

    grader: Grader
    rows: Sequence[Row]
    messages: Mapping[str, Sequence[Row]]
    task: Row | None
    traces: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    not_recorded: list[Failure] = field(default_factory=list)
    """What the scoring under way needed and no record has: a reward function may catch the exception that says so."""
    seconds: dict[str, float] = field(default_factory=dict)

    async def score(self) -> list[Row]:
        """Return the scores of the traces without an error."""
        scorable = [row for row in self.rows if row["error_class"] is None]
        for row in scorable:
            clock = time.monotonic()
            if failure := await self._catch(self._score_trace(row)):
                self.failures[row["trace_id"]] = failure
            self.seconds[row["trace_id"]] = time.monotonic() - clock
        if self.grader.compares and scorable and (failure := await self._catch(self._compare())):
            self.failures = {row["trace_id"]: failure for row in scorable} | self.failures
        return [self._score_row(row) for row in scorable]

    async def _catch(self, scoring: Any) -> Failure | None:
        """Await the environment's code and return whatever it raises as a failure: this is the boundary to its code."""
        self.not_recorded.clear()
        failure = None
        try:
            await scoring
        except Exception as error:
            failure = failure_of_exception(error)
        return next(iter(self.not_recorded), failure)

    async def _score_trace(self, row: Row) -> None:
        task, trace = self._load(row)
        self.traces[row["trace_id"]] = trace
        trace.rewards, trace.metrics = {}, self.grader.recorded_metrics(task, trace.metrics)
        trace.info.pop("judge_calls", None)  # verifiers notes those of today
        async with asyncio.timeout(task.data.timeout.scoring or SCORING_SECONDS):
            await task.score(trace)
        if names := runtime_rewards(task):
            text = f"reward {names[0]!r} needs the rollout's runtime, which has ended"
            self.not_recorded.append(Failure("incomplete", "NeedsRuntime", text))

    def _load(self, row: Row) -> tuple[Task[Any], Trace[Any, Any, Any]]:
        return self.grader.load(row, self.messages[row["trace_id"]], self.not_recorded.append)

    async def _compare(self) -> None:
        """Run the environment's `finalize` over the episode's traces, those with a recorded error included."""
        if self.failures:
            raise EnvError(f"traces of the episode could not be scored: {', '.join(sorted(self.failures))}")
        for row in self.rows:
            if row["error_class"] is not None and row["record"] != "{}":
                self.traces[row["trace_id"]] = self._load(row)[1]
        if self.task is None:
            raise ValueError("the example of this rollout is not in the examples table")
        env, declared = self.grader.env, self.grader.declared
        task = self.grader.task_of(declared.data_type().model_validate(self.task), declared)
        stamp = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = Episode(id=self.rows[0]["episode_id"], env=EnvInfo(id=env.config.env_id), task=stamp)
        episode.traces.extend(self.traces[row["trace_id"]] for row in self.rows if row["trace_id"] in self.traces)
        async with (
            asyncio.timeout(env.config.timeout.finalize or SCORING_SECONDS),
            boundary(EnvError, f"{type(env).__name__}.finalize()"),
        ):
            await env.finalize(task, episode)

    def _score_row(self, row: Row) -> Row:
        trace = self.traces.get(row["trace_id"])
        earned = {} if trace is None else trace.rewards
        rewards = {name: reward and {"score": reward.score, "weight": reward.weight} for name, reward in earned.items()}
        failure = self.failures.get(row["trace_id"]) or failure_of_rewards(rewards)
        before = json.loads(row["rewards"])
        # A trace that never had a reward, as of a user or an opponent, is fine without one.
        if failure is None and before and not rewards and not self.grader.rewards_groups:
            text = f"the environment gives this trace no reward any more; it had {', '.join(sorted(before))}"
            failure = Failure("environment", "NotScored", text)
        if trace is not None:
            info = trace.model_dump(mode="json", include={"info"})["info"]
            row = row | {"metrics": compact_json(dict(trace.metrics)), "info": compact_json(info)}
        return row | {
            "reward": trace.reward if trace is not None and rewards and failure is None else None,
            "rewards": compact_json(rewards),
            **error_columns(failure),
            "seconds": self.seconds[row["trace_id"]],
        }


class AbsentState:
    """Stands in for a state that is not recorded: a look at it is noted as a failure, whatever the function does."""

    def __init__(self, note: Callable[[Failure], None]) -> None:
        self._note = note

    def __getattr__(self, name: str) -> None:
        if not name.startswith("__"):  # copying and pickling ask for those, which is no look at the state
            text = f"its scores look at the rollout's state ({name!r}), which is not recorded"
            self._note(Failure("incomplete", "StateNotRecorded", text))
        raise AttributeError(name)


def _subclasses(kind: type[Task[Any]]) -> Iterator[type[Task[Any]]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _answer_request(connection: Connection, grader: Grader | None, functions: Mapping[str, Any]) -> None:
    request = json.loads(connection.recv_bytes())
    directory = Path(request["directory"])
    examples, traces, messages = (read_rows(directory / f"{name}.arrow").to_pylist() for name in ROWS)
    report_progress = partial(_send, connection, working=True)
    if grader:
        rows = asyncio.run(grader.score(examples, traces, messages, report_progress))
    else:
        rows = [row | {"seconds": row["scoring_seconds"]} for row in traces if row["error_class"] is None]
    if functions:
        failure = LOST if request["losses"] > 1 and not grader else None
        score_groups(functions, (examples, traces, messages), rows, report_progress, failure)
    write_rows(directory / "scores.arrow", pa.Table.from_pylist(rows, schema=SCORES))
    _send(connection, scored=len(rows))


def _send(connection: Connection, **answer: object) -> None:
    connection.send_bytes(json.dumps(answer).encode())


def grade(environment: Mapping[str, Any], report: Path, scored: str) -> None:
    """Grade for the environment of a section, plain values, until SIGTERM; write the address to `report`.

    What is scored are `rollouts` and then their groups, or `groups` alone: the environment is not loaded for these.
    Raises what the environment's package raises.
    """
    grader = Grader(environment) if scored == "rollouts" else None
    functions = {
        # Loaded once and before the first group: an edit of later is seen by no rollout of this run.
        name: settings | {"function": load_function(settings["function"])}
        for name, settings in environment["group_rewards"].items()
    }
    # Removed from the environment variables: programs that reward functions start must not have the key.
    with Listener(("127.0.0.1", 0), authkey=os.environ.pop(KEY_VARIABLE).encode()) as listener:
        host, port = listener.address
        write_report(report, {"address": f"{host}:{port}", "pid": os.getpid()})
        while True:
            try:
                with listener.accept() as connection:
                    _answer_request(connection, grader, functions)
            except (AuthenticationError, EOFError, OSError) as error:  # of this connection alone
                logging.info("a connection ended: %s: %s", type(error).__name__, error)

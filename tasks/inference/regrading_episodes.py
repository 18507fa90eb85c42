"""One recorded episode scored again: each trace for itself, then all of them compared; what fails is data."""

import asyncio
import json
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.v1.episode import EnvInfo, Episode
from verifiers.v1.errors import EnvError, boundary
from verifiers.v1.trace import TraceTask

from tasks.inference.failures import Failure, from_error, of_rewards
from tasks.inference.regrading import NotRegradable
from tasks.inference.rows import Row, error_columns

if TYPE_CHECKING:
    from tasks.inference.regrading_scores import Grader

SCORING_SECONDS = 300.0
"""Longest that scoring one trace, or comparing an episode's, may take, where the task does not say."""


class EpisodeScores:
    """One environment run: its traces, put together again, and how they are scored."""

    def __init__(
        self, grader: "Grader", rows: Sequence[Row], messages: Mapping[str, Sequence[Row]], task: Row | None
    ) -> None:
        self.grader = grader
        self.rows = rows
        self.messages = messages
        self.task = task
        self.traces: dict[str, Any] = {}
        self.failures: dict[str, Failure] = {}
        self.seconds: dict[str, float] = {}

    async def score(self) -> list[Row]:
        """Return the scores of the traces that are not errored."""
        fresh = [row for row in self.rows if row["error_class"] is None]
        for row in fresh:
            clock = time.monotonic()
            if failure := await self._attempt(self._one(row)):
                self.failures[row["trace_id"]] = failure
            self.seconds[row["trace_id"]] = time.monotonic() - clock
        if self.grader.compares and fresh and (failure := await self._attempt(self._compare())):
            self.failures = {row["trace_id"]: failure for row in fresh} | self.failures
        return [self._scored(row) for row in fresh]

    async def _attempt(self, scoring: Any) -> Failure | None:
        """Await what the environment's code does; the border at which whatever it raises becomes a failure."""
        try:
            await scoring
        except NotRegradable:
            raise
        except Exception as error:
            text = str(error) or type(error).__name__
            told = {"type": type(error).__name__, "message": text, "traceback": traceback.format_exc()}
            return from_error(told)
        return None

    async def _one(self, row: Row) -> None:
        task, trace = self.grader.loader.load(row, self.messages[row["trace_id"]], self.task, self.grader.task_of)
        self.traces[row["trace_id"]] = trace
        trace.rewards, trace.metrics = {}, self.grader.kept_metrics(task, trace.metrics)
        async with asyncio.timeout(task.data.timeout.scoring or SCORING_SECONDS):
            await task.score(trace)

    async def _compare(self) -> None:
        """Let the environment judge across the episode's traces, those that had failed before included."""
        if self.failures:
            raise EnvError(f"traces of the episode could not be scored: {', '.join(sorted(self.failures))}")
        for row in self.rows:
            if row["error_class"] is not None and row["record"] != "{}":
                own = self.messages[row["trace_id"]]
                self.traces[row["trace_id"]] = self.grader.loader.load(row, own, self.task, self.grader.task_of)[1]
        env, task = self.grader.env, self.grader.loader.dispatched(self.task, self.grader.task_of)
        stamp = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = Episode(id=self.rows[0]["episode_id"], env=EnvInfo(id=env.config.env_id), task=stamp)
        episode.traces.extend(self.traces[row["trace_id"]] for row in self.rows if row["trace_id"] in self.traces)
        async with (
            asyncio.timeout(env.config.timeout.finalize or SCORING_SECONDS),
            boundary(EnvError, f"{type(env).__name__}.finalize()"),
        ):
            await env.finalize(task, episode)

    def _scored(self, row: Row) -> Row:
        trace = self.traces.get(row["trace_id"])
        rewards = {} if trace is None else _plain(trace.rewards)
        failure = self.failures.get(row["trace_id"]) or of_rewards(rewards) or _vanished(row, rewards)
        return {
            "trace_id": row["trace_id"],
            "reward": trace.reward if trace is not None and rewards and failure is None else None,
            "rewards": _json(rewards),
            "metrics": row["metrics"] if trace is None else _json(dict(trace.metrics)),
            "info": row["info"] if trace is None else _json(trace.model_dump(mode="json", include={"info"})["info"]),
            **error_columns(failure),
            "seconds": self.seconds[row["trace_id"]],
        }


def _vanished(row: Row, rewards: Mapping[str, Any]) -> Failure | None:
    before: Iterable[str] = json.loads(row["rewards"])
    if rewards or not before:
        return None
    text = f"the environment gives this trace no reward any more; it had {', '.join(sorted(before))}"
    return Failure("environment", "NotScored", text)


def _plain(rewards: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each and {"score": each.score, "weight": each.weight} for name, each in rewards.items()}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

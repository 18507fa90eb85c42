"""try_reward: what another reward function or judge says of stored rollouts, beside the recorded reward.

Nothing is sampled. Steps are scored one after the other by worker processes: memory holds a few steps, and the numbers
of each rollout. Groups are scored by the code of graders and credited by the stage `advantage`, as in a regraded run.
"""

import inspect
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import polars as pl
import pyarrow as pa

from configs.judges import JudgeConfig
from configs.run import RunConfig, View
from flows.queries.request import NotThere
from flows.queries.step_history import StepLineage, present
from flows.queries.store_reader import StoreReader
from storage.read.frames import existing_store
from storage.read.lineage import Work
from storage.refs import Slice
from storage.schemas.stage_tables import TRACES, VERDICTS
from storage.store import Store
from tasks.advantage.stage import STAGE as ADVANTAGE
from tasks.advantage.stage import AdvantageInputs, advantage
from tasks.arrays.columns import texts, with_column
from tasks.inference.engine.client import ServedModel
from tasks.inference.grading.groups import score_groups
from tasks.judging.stage import JudgingInputs, judging
from tasks.runtime.imports import load_function
from tasks.runtime.services import Answer, Question
from tasks.runtime.stored_rows import StoredRows

Scores = dict[str, tuple[float | None, str | None]]
"""By trace what is tried says, or why it says nothing."""
STEPS_EACH = 32
"""Steps that a worker process scores before its pool is made again; a crash costs these a second try."""
GROUP_SECONDS = 60
"""Longest time for the function and one group."""
ROLLOUT = ("trace_id", "group_id", "agent", "environment", "example_id", "policy_version")
SCORED = (*ROLLOUT, "episode_id", "trainable", "error_class", "reward", "rewards", "metrics", "info")
SCHEMA = {
    **{"run": pl.String, "step": pl.Int64},
    **{name: pl.Int64 if name == "policy_version" else pl.String for name in ROLLOUT},
    **dict.fromkeys(("recorded", "score", "reward", "advantage_before", "advantage"), pl.Float64),
    "error": pl.String,
}
"""A row for each rollout for training without an error: the `recorded` reward, what is tried (`score`), and what the
reward and the advantage would have been. `error` says why there is no score."""


@dataclass(frozen=True)
class TriedReward:
    """What is tried on stored rollouts."""

    name: str
    """The name that it has among the rewards of a rollout."""
    function: str = ""
    """An import path, `module:function`; of a function of groups, as `group_rewards` names, or of reply, answer and
    row, as the scoring of own data."""
    judge: JudgeConfig | None = None
    weight: float = 1.0

    @property
    def replaces(self) -> bool:
        """Whether it stands in place of the recorded reward, and is not added to it: as it will when it is adopted."""
        return self.judge is None and num_arguments(load_function(self.function)) > 1


def num_arguments(function: Callable[..., Any]) -> int:
    """Return how many arguments a function cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some functions of C have no signature
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(part.kind in positional and part.default is part.empty for part in parameters)


@dataclass(frozen=True)
class TriedStep:
    """The work whose rows are the rollouts of one step of a run."""

    run: str
    step: int
    works: Mapping[str, Sequence[Work]]
    """By table."""
    config: RunConfig

    @classmethod
    def of(cls, reader: StoreReader, lineage: StepLineage, config: RunConfig) -> "TriedStep":
        """Return those of a lineage."""
        made = lineage.traces
        works = {"messages": reader.graph.origins(made, "messages")}
        examples = [work for work in reader.graph.ancestors(made.key) if "examples" in work.tables]
        works |= {"traces": [made], "samples": present(lineage.samples), "examples": examples[:1]}
        return cls(lineage.run, made.step, works, config)


def try_reward(reader: StoreReader, runs: Sequence[str], tried: TriedReward) -> Iterator[pl.DataFrame]:
    """Yield what is tried on the rollouts of each step of some runs: frames with the columns of SCHEMA, in order.

    A function runs in worker processes. One that raises, or returns nothing in GROUP_SECONDS, costs its group its
    score, and one that ends its process those of the step. Raises NotThere for a run without rollouts for training, and
    what a judge that is not available raises.
    """
    steps = [
        TriedStep.of(reader, lineage, config)
        for run in dict.fromkeys(runs)
        for config in [reader.config(run)]
        for lineage in reader.history(run).lineages
        if lineage.for_training
    ]
    if lacking := set(runs) - {step.run for step in steps}:
        raise NotThere(f"run {min(lacking)!r} has no rollouts for training: there is nothing to score")
    address = reader.store.root.address
    if tried.judge:  # its answers are written by this process alone
        yield from (score_step(address, step, tried) for step in steps)
        return
    count = max(1, min(os.cpu_count() or 1, len(steps)))
    for start in range(0, len(steps), STEPS_EACH * count):
        yield from _in_processes(address, steps[start : start + STEPS_EACH * count], tried, count)


def _in_processes(address: str, steps: Sequence[TriedStep], tried: TriedReward, count: int) -> Iterator[pl.DataFrame]:
    # Threads of polars and DuckDB do not survive a fork of this process; the server of forks has none yet.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(count, context) as pool:
        futures = [pool.submit(score_step, address, step, tried) for step in steps]
    for step, future in zip(steps, futures, strict=True):
        if not isinstance(future.exception(), BrokenProcessPool):
            yield future.result()
        elif len(steps) == 1:
            yield score_step(address, step, None)
        else:  # which of the steps ended the process is not known: each is tried alone
            yield from _in_processes(address, [step], tried, 1)


@cache
def _store(address: str) -> Store:
    return existing_store(address)


@cache
def _examples(address: str, slices: tuple[Slice, ...]) -> pa.Table:
    return _store(address).read(slices)


def score_step(address: str, step: TriedStep, tried: TriedReward | None) -> pl.DataFrame:
    """Return a frame of SCHEMA for the rollouts of one step; without what is tried, rows without a score."""
    store = _store(address)
    pieces = {name: tuple(chain(*(work.slices_of(name) for work in works))) for name, works in step.works.items()}
    tables = {name: store.read(pieces[name]) for name in ("traces", "messages")}
    tables["examples"] = _examples(address, pieces["examples"])
    traces = tables["traces"]
    rows = [row for row in traces.select(SCORED).to_pylist() if row["error_class"] is None and row["trainable"]]
    for row in rows:
        row["recorded"] = row["reward"]
        if tried:
            _take_out(row, tried.name)
    if tried is None:
        scores: Scores = {row["trace_id"]: (None, "the function ended its process") for row in rows}
    elif tried.judge:
        scores = _ask_judge(store, step, tables, tried.judge)
    else:
        scores = _call(tables, rows, tried)
    adds = not (tried and tried.replaces)
    weight = tried.weight if tried else 1.0
    for row in rows:
        row["score"], row["error"] = scores[row["trace_id"]]
        known = row["score"] is not None and (row["reward"] is not None or not adds)
        row["reward"] = weight * row["score"] + (row["reward"] if adds else 0.0) if known else None
    credited = ["trace_id", "advantage"]
    samples = store.read(pieces["samples"], credited).to_pylist() if pieces["samples"] else []
    before = {row["trace_id"]: row["advantage"] for row in samples}
    after = _advantages(tables, rows, step)
    described = [
        {"run": step.run, "step": step.step, **{name: row.get(name) for name in SCHEMA if name not in ("run", "step")}}
        | {"advantage_before": before.get(row["trace_id"]), "advantage": after.get(row["trace_id"])}
        for row in rows
    ]
    return pl.DataFrame(described, schema=SCHEMA)


def _take_out(row: dict[str, Any], name: str) -> None:
    """Take a recorded reward of the name that is tried out of a row: once adopted, the tried one has its place."""
    rewards = json.loads(row["rewards"])
    if part := rewards.pop(name, None):
        row.update(reward=row["reward"] - part["score"] * part["weight"], rewards=json.dumps(rewards))


def _columns(table: pa.Table, *names: str) -> list[dict[str, Any]]:
    return table.select(names).to_pylist()


def _call(tables: Mapping[str, pa.Table], rows: Sequence[dict[str, Any]], tried: TriedReward) -> Scores:
    """Return what the function says of each rollout, or why it says nothing."""
    function = load_function(tried.function)
    if num_arguments(function) > 1:
        function = _of_groups(function)
    used = {row["example_id"] for row in rows}
    examples = [row for row in _columns(tables["examples"], "example_id", "task") if row["example_id"] in used]
    messages = _columns(tables["messages"], "trace_id", "message", "sampled", "content", "body")
    scored = [dict(row) for row in rows]
    settings = {"function": function, "weight": 1.0, "partial": True, "timeout_seconds": GROUP_SECONDS, "arguments": {}}
    errors = dict.fromkeys(("error_class", "error_type", "error_message", "error_traceback"))
    for row in scored:
        row |= errors
    score_groups({tried.name: settings}, (examples, scored, messages), scored, lambda: None)
    return {
        row["trace_id"]: (_new_score(row, before), row["error_message"])
        for row, before in zip(scored, rows, strict=True)
    }


def _of_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a group that calls one of reply, answer and row for each rollout."""

    def score(group: Sequence[Any]) -> list[Any]:
        return [function(one.reply, one.task.get("answer", ""), one.task.get("row", one.task)) for one in group]

    return score


def _new_score(row: Mapping[str, Any], before: Mapping[str, Any]) -> float | None:
    if row["error_class"] is not None:
        return None
    old = json.loads(before["rewards"])
    return float(sum(reward["score"] for name, reward in json.loads(row["rewards"]).items() if name not in old))


class _Asked:
    """The services of a judge that is tried: its own address, and nobody who could renew a budget."""

    def serve(self, judge: Any) -> ServedModel:
        return ServedModel(
            judge.chat.url, os.environ.get(judge.chat.api_key_variable, ""), judge.chat.model, chat=judge.chat
        )

    def __call__(self, question: Question) -> Answer:
        return Answer(False, "reward try", "nobody is asked while a judge is tried")


def _ask_judge(store: Store, step: TriedStep, tables: Mapping[str, pa.Table], judge: JudgeConfig) -> Scores:
    services = _Asked()
    # Rewards of any name may be recorded, also of this judge: its answer is read from the judgements.
    unrewarded = with_column(tables["traces"], "rewards", pa.array(["{}"] * tables["traces"].num_rows))
    names = tables["examples"], unrewarded, tables["messages"]
    inputs = JudgingInputs(*names, store.answers, step.run, step.step, "try", services, services)
    config = step.config.model_copy(update={"judges": (judge.model_copy(update={"max_unscored": 1.0}),)})
    made = judging(inputs, View(config, ("judges",), "judging"))
    asked: Scores = {row["trace_id"]: (row["score"], row["error_message"]) for row in made["judgements"].to_pylist()}
    nothing = None, f"judge {judge.name} does not score its environment"
    return {name: asked.get(name, nothing) for name in texts(tables["traces"]["trace_id"])}


def _advantages(tables: Mapping[str, pa.Table], rows: Sequence[Mapping[str, Any]], step: TriedStep) -> dict[str, float]:
    """Return the advantage that each rollout would have with its new reward; none where the algorithm needs more."""
    rewards = {row["trace_id"]: row["reward"] for row in rows if row["reward"] is not None}
    traces = tables["traces"]
    names = traces["trace_id"].to_pylist()
    column = pa.array([rewards.get(name) for name in names], TRACES.arrow.field("reward").type)
    verdicts = [
        {"trace_id": row["trace_id"], "group_id": row["group_id"], "keep": row["trace_id"] in rewards}
        | {"reason": None if row["trace_id"] in rewards else "tried", "detected": [], "evidence": "{}"}
        for row in traces.select(["trace_id", "group_id"]).to_pylist()
    ]
    judged = pa.Table.from_pylist(verdicts, VERDICTS.arrow)
    rewarded, messages = StoredRows.of(with_column(traces, "reward", column)), StoredRows.of(tables["messages"])
    view = View(step.config, ADVANTAGE.sections, ADVANTAGE.name)
    try:
        made = advantage(AdvantageInputs(rewarded, messages, StoredRows.of(judged), None, None, step.step), view)
    except ValueError:  # an algorithm with state, or with references
        return {}
    samples = made["samples"]
    assert isinstance(samples, pa.Table), "rows in one part are credited at once"
    return {row["trace_id"]: row["advantage"] for row in _columns(samples, "trace_id", "advantage")}

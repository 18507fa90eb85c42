"""Recorded traces for the tests of regrading: made by verifiers, in the rows of a rollout, without an engine."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from storage.schemas.stage_tables import EXAMPLES
from tasks.inference.trace_rows.rows import Attempted, of_trace_record, tables


def trace_of(task: Any, replies: Sequence[str], agent: str = "agent", **changes: Any) -> Any:
    """Return a finished trace in which `task` was answered once for each of `replies`; `changes` are fields of it."""
    from verifiers.v1.configs.agent import WireAgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, UserMessage

    nodes: list[Any] = []
    for number, reply in enumerate(replies):
        asked = UserMessage(content=str(task.data.prompt) if number == 0 else "and again")
        nodes += [
            MessageNode(parent=2 * number - 1 if number else None, message=asked, token_ids=[1, 2], mask=[False] * 2),
            MessageNode(
                parent=2 * number,
                message=AssistantMessage(content=reply),
                sampled=True,
                token_ids=[7, number],
                mask=[False, True],
                logprobs=[-0.5],
            ),
        ]
    stamp = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    info = AgentInfo(config=WireAgentConfig(), name=agent)
    finished = {"is_completed": True, "ok": True, "stop_condition": "agent_completed"}
    return Trace(task=stamp, agent=info, nodes=nodes, **(finished | changes))


def scored(trace: Any, task: Any) -> Any:
    """Return the trace with the rewards that verifiers itself gives it."""
    asyncio.run(task.score(trace))
    return trace


def rows_of(episodes: Mapping[str, Sequence[Any]], environment: str, example_id: str = "x") -> dict[str, pa.Table]:
    """Return traces and messages of episodes, by episode id, all of one example."""
    traces, messages = [], []
    for number, (episode, members) in enumerate(episodes.items()):
        assignment = {
            "assignment_id": f"g/{number}",
            "group_id": "g",
            "environment": environment,
            "example_id": example_id,
        }
        for trace in members:
            row, own = of_trace_record(trace, Attempted(assignment, "p", 0, 0, 1.0), episode)
            traces.append(row)
            messages += own
    return tables(traces, messages)


def example_of(environment: str, task: str, example_id: str = "x") -> pa.Table:
    """Return the examples table of one example; `task` is its data as JSON."""
    row = {"environment": environment, "example_id": example_id, "split": "train", "task": task}
    return pa.Table.from_pylist([row], schema=EXAMPLES.arrow)

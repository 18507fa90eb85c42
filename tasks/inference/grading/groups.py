"""Rewards of whole groups: calls of functions that a config names, and the scores that come of them.

A grader's process calls `score_groups`, in its main thread, once the rollouts of a group have their own rewards.
"""

import asyncio
import faulthandler
import inspect
import json
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from tasks.inference.trace_rows.failures import STRAGGLER, Failure, failure_of_exception, failure_of_rewards
from tasks.inference.trace_rows.rows import Row, compact_json, error_columns

GRACE_SECONDS = 30
"""Time after its limit for a function that no exception reaches, as in a loop of C; then its process ends."""


@dataclass(frozen=True)
class GroupRollout:
    """A rollout of a group, for a function that scores all of them."""

    episode_id: str
    agent: str
    """The seat that it played."""
    task: Row
    """The data of the example's task."""
    messages: Sequence[Row]
    """All messages in order, each with `role` and `content` at least."""
    reply: str
    """The text of the last message that the model sampled; empty without one."""
    reward: float | None
    """The weighted sum of its own rewards; None without any."""
    rewards: Row
    """`score` and `weight` of its own rewards, by name."""
    metrics: Row
    info: Row


def score_groups(
    functions: Mapping[str, Any],
    tables: Sequence[Sequence[Row]],
    rows: Sequence[Row],
    report_progress: Callable[[], None],
    failure: Failure | None = None,
) -> None:
    """Add what functions give to groups to `rows`: traces without an error, with the columns of SCORES.

    `functions` are sections by name, each with the function itself in place of its path; `tables` are examples, traces
    and messages of whole groups. Only trainable rollouts are scored. If one of a group has an error, the others become
    errors too, unless all functions are `partial`. What goes wrong in a function, or `failure`, is an error of all
    rollouts of the group.
    """
    tasks = {row["example_id"]: json.loads(row["task"]) for row in tables[0]}
    messages, replies = defaultdict[str, list[Row]](list), dict[str, str]()
    for row in sorted(tables[2], key=lambda row: row["message"]):
        messages[row["trace_id"]].append(json.loads(row["body"]))
        if row["sampled"]:
            replies[row["trace_id"]] = row["content"] or ""
    accepts_partial = all(settings["partial"] for settings in functions.values())
    groups = defaultdict[str, list[Row]](list)
    for row in {row["trace_id"]: row for row in (*tables[1], *rows)}.values():
        if row["trainable"]:
            groups[row["group_id"]].append(row)
    for members in groups.values():
        standing = [row for row in members if row["error_class"] is None]
        group = [
            GroupRollout(
                task=tasks[row["example_id"]],
                messages=messages[row["trace_id"]],
                reply=replies.get(row["trace_id"], ""),
                **{name: row[name] for name in ("episode_id", "agent", "reward")},
                **{name: json.loads(row[name]) for name in ("rewards", "metrics", "info")},
            )
            for row in standing
        ]
        lost, problem = {row["error_class"] for row in members} - {None}, failure
        if lost and not accepts_partial:
            kind = STRAGGLER if lost == {STRAGGLER} else "incomplete"
            problem = Failure(kind, "IncompleteGroup", f"rollouts of the group are lost: {', '.join(sorted(lost))}")
        for name in sorted(functions) if group else ():
            problem = problem or _add_reward(name, functions[name], group, standing)
            report_progress()
        for row in standing if problem else ():
            row.update(reward=None, **error_columns(problem))


def _add_reward(
    name: str, settings: Mapping[str, Any], group: Sequence[GroupRollout], rows: Sequence[Row]
) -> Failure | None:
    """Add to rows what a function gives their group; return what went wrong: this is the boundary to its code."""
    seconds = settings["timeout_seconds"]
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True)
    try:
        values = settings["function"]([*group], **settings["arguments"])
        values = [*(asyncio.run(values) if inspect.iscoroutine(values) else values)]
        if len(values) != len(rows):
            raise ValueError(f"it returned {len(values)} values for {len(rows)} rollouts")
        problems = [_add(name, settings["weight"], *scored) for scored in zip(values, rows, strict=True)]
    except Exception as error:
        return failure_of_exception(error, f"group reward {name!r}: ")
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
    return next(filter(None, problems), None)


def _stop(*_: object) -> None:
    raise TimeoutError("no result within timeout_seconds")


def _add(name: str, weight: float, value: Any, row: Row) -> Failure | None:
    """Add the number or the parts that a function returned to the rewards of a row."""
    rewards = json.loads(row["rewards"])
    for part, score in value.items() if isinstance(value, dict) else [(name, value)]:
        if not isinstance(score, Real):
            raise TypeError(f"{part!r} is {score!r}, which is no number")
        if part in rewards:
            raise ValueError(f"the rollouts have a reward {part!r} already; name this one otherwise")
        rewards[part] = {"score": float(score), "weight": weight}
    total = sum(reward["score"] * reward["weight"] for reward in rewards.values())
    row.update(reward=total, rewards=compact_json(rewards))
    return failure_of_rewards(rewards)

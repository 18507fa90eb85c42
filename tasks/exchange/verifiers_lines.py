"""Reads and writes lines of verifiers files: episodes as its command line writes them, traces as prime-rl does.

Two layouts are known. An episode holds its `traces`, and what ran it in `env`, `group` and `run`. A trace by itself
names environment, group, episode and policy in its `info`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.exchange.episodes import (
    LARGEST_STEP,
    TRAIN,
    Episode,
    ImportContext,
    Origin,
    Row,
    Unfit,
    checked_number,
    compact,
    digest,
    first,
    mapping,
)
from tasks.exchange.traces import MARK, empty_row, shortest, trace_rows, with_failure, with_short_logprobs
from tasks.inference.trace_rows.failures import NON_FINITE, Failure, failure_of_error
from tasks.inference.trace_rows.rows import canonical_json, rebuild

UNNAMED = "imported"
"""The environment of rollouts that name none."""
HELD_OUT = "eval"
"""The field `split` of a line that we wrote of an attempt at a held-out example; other lines have no such field."""


def is_verifiers(line: Mapping[str, Any]) -> bool:
    """Tell a line of a verifiers file from a conversation."""
    return isinstance(line.get("traces"), list) or isinstance(line.get("nodes"), list)


def read_episode(line: Row, origin: Origin, context: ImportContext, step: int | None) -> Episode:
    """Return the episode of a line; `step` is what the file's path says, for lines that say nothing themselves.

    Raises Unfit where it cannot become rows.
    """
    if not is_verifiers(line):
        raise Unfit("the line is neither an episode nor a trace", "it has neither `traces` nor `nodes`")
    whole = isinstance(line.get("traces"), list)
    outer = {name: value for name, value in line.items() if name != "traces"} if whole else None
    traces = line["traces"] if whole else [line]
    rows, messages = [], []
    for at, trace in enumerate(traces):
        if not isinstance(trace, dict):
            raise Unfit("a trace is no object")
        # The episode's own fields are kept once, with its first trace.
        of_episode = {"episode": outer} if at == 0 and whole else {}
        place = {"file": origin.number, "line": origin.line, "at": at, **of_episode}
        row, own = trace_rows(trace, context, place)
        rows.append(row)
        messages += own
    return _episode(line, origin, context, step, *_count_failure(line, origin, rows, messages, outer))


def _count_failure(
    line: Mapping[str, Any], origin: Origin, rows: list[Row], messages: list[Row], outer: Row | None
) -> tuple[list[Row], list[Row]]:
    """Let an error of the episode count for its faultless traces, or for the rollout that left none."""
    if outer is None:
        return rows, messages
    errors = outer.get("errors") or []
    whole = failure_of_error(errors[-1]) if errors and not outer.get("ok", True) else None
    if rows:
        return [with_failure(row, whole) if whole and row["error_class"] is None else row for row in rows], messages
    # A rollout without a trace still answers an assignment, or a group would lose a member unseen.
    nothing = Failure("incomplete", "NoTrace", "the environment ran no agent and recorded no error")
    mark = {"tokens": "", "file": origin.number, "line": origin.line, "at": 0, "episode": outer}
    row = with_failure(empty_row(digest("no trace", str(line.get("id")), canonical_json(outer))), whole or nothing)
    return [{**row, "record": compact({MARK: mark})}], []


def _episode(
    line: Row, origin: Origin, context: ImportContext, step: int | None, rows: list[Row], messages: list[Row]
) -> Episode:
    run, info = mapping(line.get("run")), {} if "traces" in line else mapping(line.get("info"))
    work, environment = mapping(run.get("work")), mapping(line.get("env"))
    said = first(work.get("step"), run.get("step") if "traces" not in line else None, step)
    version = first(mapping(work.get("policy")).get("start"), info.get("policy_version"))
    named = (environment.get("name"), environment.get("id"), info.get("env_name"))
    group = first(mapping(line.get("group")).get("id"), info.get("group_id"))
    example_id, task = _example(line.get("task"))
    return Episode(
        origin=origin,
        episode_id=str(first(info.get("episode_id"), line.get("id"), rows[0]["trace_id"])),
        environment=context.environment or str(first(*(name or None for name in named), UNNAMED)),
        example_id=example_id,
        task=task,
        group=None if group is None else str(group),
        step=None if said is None else _step(said),
        traces=[{**row, **_staleness(version, said)} for row in rows],
        messages=messages,
        split=HELD_OUT if line.get("split") == HELD_OUT else TRAIN,
        seed=_seed(line),
    )


def _example(task: Any) -> tuple[str, str]:
    """Return the durable id of a task and its data as JSON."""
    if not isinstance(task, Mapping):
        raise Unfit("the line has no task")
    data = task.get("data", task)
    if not isinstance(data, Mapping):
        raise Unfit("the task's data is no object")
    # idx is the task's place in a list, which says nothing of the task.
    content = canonical_json({name: value for name, value in data.items() if name != "idx"})
    found = first(data.get("id"), task.get("key"), task.get("hash"), digest(content))
    return str(found), canonical_json(data)


def _step(said: Any) -> int:
    checked_number(said, "step", 0, LARGEST_STEP)
    if not isinstance(said, int):
        raise Unfit("a step is no whole number", f"step: {said}")
    return said


def _staleness(version: Any, step: Any) -> Row:
    """Return the policy's version and how far behind the step it was; prime-rl counts steps from 1."""
    if type(version) is not int or version < 0:
        return {}
    checked_number(version, "version of the policy", 0, LARGEST_STEP)
    return {"policy_version": version, "staleness": max(0, step - 1 - version) if type(step) is int else 0}


def _seed(line: Mapping[str, Any]) -> int:
    trace = (line.get("traces") or [line])[0] if "traces" in line else line
    calls = [mapping(mapping(call).get("sampling")).get("seed") for call in mapping(trace).get("calls") or []]
    return next((seed for seed in calls if type(seed) is int and 0 <= seed < 2**63), 0)


def line_of(
    run: str, step: int, rows: Sequence[Row], messages: Mapping[str, list[Row]], assignment: Row, example: Row
) -> Row:
    """Return the line of one episode: its rows of traces, their messages by trace, its assignment and its example."""
    task = _task(rows, example)
    traces = [_trace(row, messages.get(row["trace_id"], []), task) for row in rows]
    errors = [_error(row) for row in rows if row["error_class"] is not None]
    version = rows[0]["policy_version"]
    work = {"type": "train", "step": step, "policy": {"start": version, "end": version}}
    return {
        "id": rows[0]["episode_id"],
        "env": {"id": assignment["environment"], "name": assignment["environment"]},
        "task": task,
        "group": {"id": assignment["group_id"]},
        "run": {"type": "train", "id": run, "name": run, "work": work},
        "ok": not errors,
        "is_timeout": False,
        "errors": [] if any(trace is not None for trace in traces) else errors,
        "traces": [trace for trace in traces if trace is not None],
        **({} if example["split"] == TRAIN else {"split": HELD_OUT}),
    }


def _task(rows: Sequence[Row], example: Row) -> Row:
    for row in rows:
        task = json.loads(row["record"]).get("task")
        if task is not None:
            return dict(task)
    return {"type": "WireTaskData", "data": {"idx": 0, **json.loads(example["task"])}, "key": example["example_id"]}


def _trace(row: Row, messages: list[Row], task: Row) -> Row | None:
    """Return the trace as it came over the wire, or one made of its messages; None where there is neither."""
    if found := with_short_logprobs(rebuild(row, messages)):
        for node, message in zip(found["nodes"], messages, strict=True):
            node["message"] = _message(message)
        # Whoever reads the file refuses such a reward, unless the trace says that it failed; we do.
        failed = {"ok": False, "errors": [_error(row)]} if row["error_type"] == NON_FINITE else {}
        return found | failed
    if not messages:
        return None
    return {
        "version": 1,
        "id": row["trace_id"],
        "task": task,
        "agent": {"config": {}, "name": row["agent"], "trainable": row["trainable"]},
        "nodes": [_node(message) for message in messages],
        **{name: json.loads(row[name]) for name in ("rewards", "metrics", "info")},
        "is_completed": True,
        "ok": row["error_class"] is None,
        "stop_condition": row["stop_condition"],
        "errors": [] if row["error_class"] is None else [_error(row)],
        "timing": {"start": row["started_at"].timestamp()},
    }


def _node(message: Row) -> Row:
    # The table has one for every token; verifiers has them of sampled tokens alone.
    logprobs = [value for value, sampled in zip(message["logprobs"], message["mask"], strict=True) if sampled]
    return {
        "parent": message["parent"],
        "message": _message(message),
        **{name: message[name] for name in ("sampled", "token_ids", "mask", "is_content")},
        "logprobs": shortest(logprobs),
    }


def _message(row: Row) -> Row:
    body: Row = json.loads(row["body"])
    return body if "role" in body else {"role": row["role"], "content": row["content"]}


def _error(row: Row) -> Row:
    return {"type": row["error_type"], "message": row["error_message"], "traceback": row["error_traceback"]}

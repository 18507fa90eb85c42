"""Lines of our own export: episodes in verifiers' form with a block `stagecoach` that holds what verifiers has not.

With it a run is imported again exactly as it was: the assignment, the example, every column of traces, and whatever of
the messages verifiers' form would change. Programs that read verifiers' files pass over the block.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from storage.schemas.stage_tables import ASSIGNMENTS, EXAMPLES, TRACES
from tasks.exchange.checks import check_nodes
from tasks.exchange.episodes import Episode, Origin, Reading, Row, compact, mapping
from tasks.exchange.patches import shortest
from tasks.exchange.problems import Unfit
from tasks.exchange.traces import OWN_COLUMNS, exact
from tasks.inference.trace_rows.rows import NODE_COLUMNS, message_rows, rebuild

BLOCK = "stagecoach"
BLOCK_VERSION = 1
PARSED = ("rewards", "metrics", "info")
"""Columns of traces that are JSON and have a field of their own in verifiers' form."""
TRACE_COLUMNS = tuple(name for name in TRACES.arrow.names if name not in ("record", *PARSED))


def line_of(
    run: str, step: int, rows: Sequence[Row], messages: Mapping[str, list[Row]], assignment: Row, example: Row
) -> Row:
    """Return the line of one episode: its rows of traces, their messages by trace, its assignment and its example."""
    task = _task(rows, example)
    traces = [_trace(row, messages.get(row["trace_id"], []), task) for row in rows]
    errors = [_error(row) for row in rows if row["error_class"] is not None]
    version = rows[0]["policy_version"]
    return {
        "id": rows[0]["episode_id"],
        "env": {"id": assignment["environment"], "name": assignment["environment"]},
        "task": task,
        "group": {"id": assignment["group_id"]},
        "run": {
            "type": "train",
            "id": run,
            "name": run,
            "work": {"type": "train", "step": step, "policy": {"start": version, "end": version}},
        },
        "ok": not errors,
        "is_timeout": False,
        "errors": [] if any(trace is not None for trace in traces) else errors,
        "traces": [trace for trace in traces if trace is not None],
        BLOCK: {
            "version": BLOCK_VERSION,
            "run": run,
            "step": step,
            "assignment": dict(assignment),
            "example": dict(example),
            "traces": [
                _block(row, messages.get(row["trace_id"], []), trace) for row, trace in zip(rows, traces, strict=True)
            ],
        },
    }


def read_own(line: Row, origin: Origin, reading: Reading) -> Episode:
    """Return the episode of a line of our own. Raises Unfit where the block or a trace is not whole."""
    block = mapping(line[BLOCK])
    if block.get("version") != BLOCK_VERSION:
        raise Unfit(
            "the block `stagecoach` is of another version", f"{block.get('version')!r}, known is {BLOCK_VERSION}"
        )
    assignment, example = mapping(block.get("assignment")), mapping(block.get("example"))
    whole = set(assignment) == set(ASSIGNMENTS.arrow.names) and set(example) == set(EXAMPLES.arrow.names)
    blocks = block.get("traces")
    if not whole or type(block.get("step")) is not int or not isinstance(blocks, list) or not blocks:
        raise Unfit("the block `stagecoach` is incomplete")
    traces = iter(line.get("traces") or [])
    rows, messages = [], []
    for one in blocks:
        row, own = _rows(one, next(traces, None) if one.get("trace") else None, reading)
        rows.append(row)
        messages += own
    return Episode(
        origin=origin,
        episode_id=rows[0]["episode_id"],
        environment=example["environment"],
        example_id=example["example_id"],
        task=example["task"],
        split=example["split"],
        group=f"{block.get('run')}:{assignment['group_id']}",
        step=block["step"],
        traces=rows,
        messages=messages,
        assignment=dict(assignment),
        seed=assignment["seed"],
    )


def _rows(block: Mapping[str, Any], trace: Any, reading: Reading) -> tuple[Row, list[Row]]:
    columns = mapping(block.get("columns"))
    if set(columns) != set(TRACE_COLUMNS):
        raise Unfit("the block `stagecoach` lacks columns of a trace", ", ".join(set(TRACE_COLUMNS) ^ set(columns)))
    row = {**columns, "started_at": datetime.fromisoformat(columns["started_at"])}
    if trace is None:
        return {**row, **{name: block.get(name, "{}") for name in PARSED}, "record": block.get("record", "{}")}, []
    if not isinstance(trace, dict) or trace.get("id") != row["trace_id"]:
        raise Unfit("the block `stagecoach` and the traces do not fit", f"trace {row['trace_id']}")
    check_nodes(trace["nodes"], reading.vocab_size)
    messages = message_rows(trace)
    for number, changed in mapping(block.get("messages")).items():
        messages[int(number)] |= changed
    texts = {name: block.get(name, compact(trace.get(name, {}))) for name in PARSED}
    return {**row, **texts, "record": block.get("record", compact(_rest(trace)))}, messages


def _rest(trace: Row) -> Row:
    """Return the trace without what has columns of its own."""
    nodes = [{name: value for name, value in node.items() if name not in NODE_COLUMNS} for node in trace["nodes"]]
    return {**{name: value for name, value in trace.items() if name not in OWN_COLUMNS}, "nodes": nodes}


def _task(rows: Sequence[Row], example: Row) -> Row:
    for row in rows:
        task = json.loads(row["record"]).get("task")
        if task is not None:
            return dict(task)
    return {"type": "WireTaskData", "data": {"idx": 0, **json.loads(example["task"])}, "key": example["example_id"]}


def _trace(row: Row, messages: list[Row], task: Row) -> Row | None:
    """Return the trace as it came over the wire, or one made of its messages; None where there is neither."""
    if found := exact(rebuild(row, messages)):
        for node, message in zip(found["nodes"], messages, strict=True):
            node["message"] = _message(message)
        return found
    if not messages:
        return None
    return {
        "version": 1,
        "id": row["trace_id"],
        "task": task,
        "agent": {"config": {}, "name": row["agent"], "trainable": row["trainable"]},
        "nodes": [_node(message) for message in messages],
        **{name: json.loads(row[name]) for name in PARSED},
        "is_completed": True,
        "ok": row["error_class"] is None,
        "stop_condition": row["stop_condition"],
        "errors": [] if row["error_class"] is None else [_error(row)],
        "timing": {"start": row["started_at"].timestamp()},
    }


def _node(message: Row) -> Row:
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


def _block(row: Row, messages: list[Row], trace: Row | None) -> Row:
    """Return what of a trace's rows cannot be had from the trace."""
    columns = {name: row[name] for name in TRACE_COLUMNS}
    columns |= {"started_at": row["started_at"].isoformat(), "temperature": shortest([row["temperature"]])[0]}
    found: Row = {"trace": trace is not None, "columns": columns}
    if trace is None:
        return found | {name: row[name] for name in (*PARSED, "record") if row[name] != "{}"}
    found |= {name: row[name] for name in PARSED if compact(trace.get(name, {})) != row[name]}
    if compact(_rest(trace)) != row["record"]:
        found["record"] = row["record"]
    changed = {str(i): _changed(*pair) for i, pair in enumerate(zip(message_rows(trace), messages, strict=True))}
    return found | {"messages": {number: columns for number, columns in changed.items() if columns}}


def _changed(made: Row, message: Row) -> Row:
    wanted = {**message, "logprobs": shortest(message["logprobs"])}
    return {name: value for name, value in wanted.items() if made[name] != value}

"""Turns one trace in verifiers' form into rows, and these rows back into the trace as it was.

Nothing of a trace is lost: what has no column of its own, fields that nobody here knows included, is in the row's
record, and what rebuilding gives differently from the file (a field that was left out, lists of tokens that were
empty) is there as a patch, the difference of two JSON values. The record's field `imported` says so.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from tasks.exchange.episodes import (
    NO_POLICY,
    RENDERED,
    SAMPLED,
    UNKNOWN_POLICY,
    ImportContext,
    Row,
    Unfit,
    compact,
    mapping,
    paths,
)
from tasks.exchange.nodes import check_nodes, origin_of, render_tokens
from tasks.inference.trace_rows.failures import Failure, failure_of_trace
from tasks.inference.trace_rows.rows import NODE_COLUMNS, error_columns, message_rows, rebuild

MARK = "imported"
"""The field of a record that says where a trace was read; what our own runs sampled has none."""
OWN_COLUMNS = ("id", "rewards", "metrics", "info")
"""Fields of a trace that are columns of traces, word for word."""
LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
"""Stop conditions that cut a rollout short."""


def trace_rows(trace: Mapping[str, Any], context: ImportContext, place: Mapping[str, Any]) -> tuple[Row, list[Row]]:
    """Return a trace as a row of traces, without the columns of its assignment, and as rows of messages.

    `place` says where it was read; it is kept in the record. Raises Unfit where the trace cannot be rows.
    """
    nodes = check_nodes(trace.get("nodes"), context.vocab_size)
    if not isinstance(trace.get("id"), str) or not trace["id"]:
        raise Unfit("a trace has no id")
    temperature = sampling_temperature(trace)
    tokens = origin_of(nodes, temperature)
    if tokens == RENDERED:
        nodes = render_tokens(nodes, trace.get("tools") or [], context.render)
    if tokens != SAMPLED:
        nodes = [{**node, "logprobs": [0.0] * sum(node["mask"])} for node in nodes]
    whole = {"ok": not trace.get("errors"), "errors": [], "is_timeout": False, "stop_condition": None}
    whole |= {"rewards": {}, "metrics": {}, "info": {}, **trace, "nodes": nodes}
    messages = message_rows(whole)
    row = _row(whole, tokens, 1.0 if temperature is None else temperature)
    mark = {"tokens": tokens, "temperature": "unknown"} if temperature is None else {"tokens": tokens}
    return _with_record(row, messages, trace, {**mark, **place}), messages


def source_of(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Row:
    """Return the trace as it stood in the file, out of rows that `trace_rows` made."""
    mark = json.loads(row["record"])[MARK]
    found: Row = apply_patch(_rebuild(row, messages), mark.get("patch"))
    return {name: mark.get("id", value) if name == "id" else value for name, value in found.items()}


def with_short_logprobs(trace: Row) -> Row:
    """Return a rebuilt trace with log-probs spelt as shortly as they were written."""
    for node in trace.get("nodes", ()):
        node["logprobs"] = shortest(node["logprobs"])
    return trace


def sampling_temperature(trace: Mapping[str, Any]) -> float | None:
    """Return the temperature that a trace was sampled at, None where it does not say; raise Unfit for several."""
    calls = [mapping(mapping(call).get("sampling")).get("temperature") for call in trace.get("calls") or []]
    said = {float(value) for value in calls if isinstance(value, (int, float))}
    if len(said) > 1:
        raise Unfit("calls of one trace differ in temperature", ", ".join(map(str, sorted(said))))
    config = mapping(mapping(trace.get("agent")).get("config"))
    general = mapping(config.get("sampling")).get("temperature")
    return said.pop() if said else float(general) if isinstance(general, (int, float)) else None


def with_failure(row: Row, failure: Failure) -> Row:
    """Return a row of traces with an error in place of its reward."""
    return {**row, "reward": None, **error_columns(failure)}


def empty_row(trace_id: str) -> Row:
    """Return the row of a rollout that left no trace, its error apart."""
    row = _row({"id": trace_id, "nodes": [], "rewards": {}, "metrics": {}, "info": {}, "stop_condition": None}, "", 1.0)
    return {**row, "policy_key": NO_POLICY, "record": "{}"}


def _row(trace: Mapping[str, Any], tokens: str, temperature: float) -> Row:
    failure = failure_of_trace(trace) if "ok" in trace else None
    agent, timing, nodes = mapping(trace.get("agent")), mapping(trace.get("timing")), trace["nodes"]
    masks = [flag for node in nodes for flag in node["mask"]]
    return {
        "trace_id": trace["id"],
        "agent": agent.get("name") or "agent",
        "trainable": bool(agent.get("trainable", True)),
        "policy_key": UNKNOWN_POLICY if tokens == SAMPLED else NO_POLICY,
        "temperature": temperature,
        "reward": None if failure is not None or not trace["rewards"] else _total(trace["rewards"]),
        **{name: compact(trace[name]) for name in ("rewards", "metrics", "info")},
        "stop_condition": trace["stop_condition"],
        "is_truncated": _is_truncated(trace),
        "num_turns": sum(node["sampled"] for node in nodes),
        "num_branches": len(paths([node["parent"] for node in nodes])),
        "num_input_tokens": masks.count(False),
        "num_output_tokens": masks.count(True),
        **error_columns(failure),
        "started_at": datetime.fromtimestamp(timing.get("start") or 0, UTC),
        "setup_seconds": _duration(timing.get("boot")) + _duration(timing.get("setup")),
        "generation_seconds": _duration(timing.get("agent")),
        "model_seconds": float(sum(_duration(mapping(call).get("time")) for call in trace.get("calls") or [])),
        "scoring_seconds": _duration(timing.get("scoring")),
    }


def _with_record(row: Row, messages: Sequence[Row], trace: Mapping[str, Any], mark: Row) -> Row:
    rest = {name: value for name, value in trace.items() if name not in OWN_COLUMNS}
    rest["nodes"] = [{name: node[name] for name in node if name not in NODE_COLUMNS} for node in trace["nodes"]]
    row = {**row, "record": compact({**rest, MARK: mark})}
    patch = difference(_rebuild(row, messages), dict(trace))
    return row if patch is None else {**row, "record": compact({**rest, MARK: {**mark, "patch": patch}})}


def _rebuild(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Row:
    trace = with_short_logprobs(rebuild(row, messages))
    del trace[MARK]
    return trace


def _total(rewards: Mapping[str, Any]) -> float:
    return float(sum(reward["score"] * reward["weight"] for reward in rewards.values() if reward is not None))


def _is_truncated(trace: Mapping[str, Any]) -> bool:
    if trace["stop_condition"] in LIMITS:
        return True
    whole = [call for call in trace.get("calls") or [] if mapping(call).get("error") is None]
    return bool(whole) and mapping(whole[-1]).get("finish_reason") == "length"


def _duration(span: Any) -> float:
    start, end = mapping(span).get("start") or 0.0, mapping(span).get("end") or 0.0
    return max(0.0, float(end - start)) if end else 0.0


SET, REMOVE, INSIDE = "set", "remove", "inside"
"""A patch is `{"set": value}`, or `{"remove": [names], "inside": {name or place: patch}}`; None is no difference."""
Patch = dict[str, Any]


def difference(old: Any, new: Any) -> Patch | None:
    """Return the patch that makes `new` of `old`, or None where they are equal; 1, 1.0 and true are three values."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = {name: (old.get(name, ...), value) for name, value in new.items()}
        return _inside(pairs, [name for name in old if name not in new])
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        found = _inside({str(place): pair for place, pair in enumerate(zip(old, new, strict=True))}, [])
        # A list that differs in most places is shorter as a whole.
        return found if found is None or len(found[INSIDE]) * 2 < len(new) or not _plain(new) else {SET: new}
    return None if _same(old, new) else {SET: new}


def apply_patch(old: Any, patch: Patch | None) -> Any:
    """Return what `patch` makes of `old`, which is left as it is."""
    if patch is None:
        return old
    if SET in patch:
        return patch[SET]
    inside = patch.get(INSIDE, {})
    if isinstance(old, list):
        return [apply_patch(value, inside.get(str(place))) for place, value in enumerate(old)]
    kept = {name: value for name, value in old.items() if name not in patch.get(REMOVE, ())}
    return kept | {name: apply_patch(kept.get(name), one) for name, one in inside.items()}


def shortest(values: Any) -> list[float]:
    """Return float32 values as the shortest decimals that are these values: 0.1, not 0.10000000149011612."""
    return [float(str(value)) for value in np.asarray(values, np.float32)]


def _inside(pairs: Mapping[str, tuple[Any, Any]], removed: list[str]) -> Patch | None:
    inside = {}
    for name, (old, new) in pairs.items():
        found = {SET: new} if old is ... else difference(old, new)
        if found is not None:
            inside[name] = found
    if not inside and not removed:
        return None
    return {INSIDE: inside} | ({REMOVE: removed} if removed else {})


def _plain(values: list[Any]) -> bool:
    return not any(isinstance(value, (dict, list)) for value in values)


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float) and old != old and new != new:
        return True
    return type(old) is type(new) and bool(old == new)

"""Turns one trace in verifiers' form into rows, and these rows back into the trace as it was.

Nothing of a trace is lost: what has no column of its own, fields that nobody here knows included, is in the row's
record, and what rebuilding gives differently from the file (a field that was left out, lists of tokens that were
empty) is there as a patch, the difference of two JSON values. The record's field `imported` says so.
What no policy sampled gets the tokens that the file has, or else those of the renderer.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, LiteralString, Self

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from tasks.exchange.episodes import (
    GIVEN,
    NO_POLICY,
    RENDERED,
    SAMPLED,
    UNKNOWN_POLICY,
    ImportContext,
    Render,
    Row,
    Unfit,
    checked_number,
    compact,
    mapping,
    paths,
)
from tasks.inference.trace_rows.failures import Failure, failure_of_trace
from tasks.inference.trace_rows.rows import (
    NODE_COLUMNS,
    TRACE_COLUMNS,
    error_columns,
    message_rows,
    outcome_columns,
    rebuild,
)

LARGEST_REWARD = 1e9
"""What is larger drowns all other rewards; its square, and sums of it, stay far from infinite in single precision."""
LARGEST_METRIC = 10**30
LARGEST_TEMPERATURE = 1e3
LARGEST_SECONDS = 1e9
Part = Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD, allow_inf_nan=False)]
Logprob = Annotated[float, Field(ge=float(np.finfo(np.float32).min), le=0)]


def _refusal(reason: LiteralString, detail: str = "") -> PydanticCustomError:
    """Return an error of a value; `detail` goes on after the value's place."""
    return PydanticCustomError("unfit", reason, {"detail": detail})


def _check_metric(value: Any) -> Any:
    # It may be NaN or infinite: the environment could not measure it.
    if type(value) is int and abs(value) > LARGEST_METRIC:
        raise _refusal("a metric is out of range")
    return value


def _check_name(name: str) -> str:
    if not name.strip():
        raise _refusal("a name is empty")
    return name


Name = Annotated[str, AfterValidator(_check_name)]
Metric = Annotated[Any, AfterValidator(_check_metric)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class MessageShape(Strict):
    """What a message must be; other fields may be anything."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class NodeShape(Strict):
    """What a node must be, its lists filled in."""

    parent: int | None = Field(ge=0)
    message: MessageShape
    sampled: bool
    token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]]
    mask: list[bool]
    is_content: list[bool]
    logprobs: list[Logprob]

    @model_validator(mode="after")
    def _lists_fit(self) -> Self:
        lists = ("token_ids", "mask", "is_content", "logprobs")
        sizes = " has " + ", ".join(f"{len(getattr(self, name))} {name}" for name in lists)
        if len(self.mask) != len(self.token_ids) or len(self.is_content) not in (0, len(self.token_ids)):
            raise _refusal("per-token lists differ in length", sizes)
        if any(self.mask) and not self.sampled:
            raise _refusal("a mask is set on a message that was not sampled", sizes)
        if len(self.logprobs) not in (0, sum(self.mask)):
            raise _refusal("log-probs and sampled tokens differ in number", sizes)
        return self


def _check_parents(nodes: list[NodeShape]) -> list[NodeShape]:
    for number, node in enumerate(nodes):
        if node.parent is not None and node.parent >= number:
            raise _refusal("a node's parent does not precede it", f".{number}.parent is {node.parent}")
    return nodes


class RewardShape(Strict):
    """What a reward must be."""

    score: Part
    weight: Part


class TraceShape(Strict):
    """What a trace must be, so that its numbers can be asked for by name and added up."""

    id: Annotated[str, StringConstraints(min_length=1)]
    nodes: Annotated[list[NodeShape], AfterValidator(_check_parents)]
    rewards: dict[Name, RewardShape | None]
    metrics: dict[Name, Metric]


def check_trace(trace: Mapping[str, Any], nodes: Any, vocab_size: int) -> None:
    """Raise Unfit unless a trace with these nodes can be rows; token ids are below `vocab_size`, if it is known."""
    rewards = trace.get("rewards", {})
    # Rewards of a rollout that failed count for nothing and may be anything, but for their names.
    if not trace.get("ok", not trace.get("errors")) and isinstance(rewards, dict):
        rewards = dict.fromkeys(rewards)
    shape = {"metrics": {}, **trace, "nodes": nodes, "rewards": rewards}
    try:
        checked = TraceShape.model_validate(shape)
    except ValidationError as error:
        problem = error.errors()[0]
        place = [part for part in problem["loc"] if part != "[key]"]  # pydantic's mark of a name
        # Without the second part, the number of a node or a name of the file's: reasons are counted.
        field = ".".join(part for part in (*place[:1], *place[2:]) if isinstance(part, str))
        detail = problem.get("ctx", {}).get("detail") or f" is {str(problem['input'])[:40]}"
        where = ".".join(str(part)[:40] for part in place)
        raise Unfit(f"{field}: {problem['msg']}", where + detail) from error
    if vocab_size and any(token >= vocab_size for node in checked.nodes for token in node.token_ids):
        raise Unfit("a token id is out of range", f"ids are whole numbers from 0 to {vocab_size - 1}")


TOOL_FIELDS = ("name", "description", "parameters")
"""What of a tool a chat template may ask for."""


def origin_of(nodes: Sequence[Row], temperature: float | None) -> str:
    """Say where the tokens of a trace come from; see `SAMPLED`, `GIVEN` and `RENDERED`.

    Log-probs mean nothing without the temperature that they were taken at, nor at 0.
    """
    if not any(node["token_ids"] for node in nodes):
        return RENDERED if any(node["sampled"] for node in nodes) else SAMPLED
    scored = all(len(node["logprobs"]) == sum(node["mask"]) for node in nodes)
    return SAMPLED if scored and temperature != 0 else GIVEN


def render_tokens(nodes: Sequence[Row], tools: Sequence[Mapping[str, Any]], render: Render | None) -> list[Row]:
    """Return the nodes with tokens that the renderer makes of them, every path from the root by itself.

    Only what a policy would sample of messages that were sampled is in the mask. What follows the last reply of a path
    has no tokens. Raises Unfit where there is no renderer, and where two paths render a message that they share to
    different tokens.
    """
    if render is None:
        raise Unfit("there are no token ids, and no model was named to make them (--model DIR, model.renderer=NAME)")
    made: dict[int, Row] = {}
    for path in paths([node["parent"] for node in nodes]):
        # What follows the last reply was never shown to the model as a prompt.
        replies = [place for place, number in enumerate(path) if nodes[number]["message"]["role"] == "assistant"]
        spoken = path[: replies[-1] + 1] if replies else []
        said = [openai_message(nodes[number]["message"]) for number in spoken]
        rows = render(said, _tool_schemas(tools)) if spoken else []
        for number, row in zip(spoken, rows, strict=True):
            if made.setdefault(number, row)["token_ids"] != row["token_ids"]:
                raise Unfit("branches render a message they share to different tokens", f"node {number}")
    return [{**node, **_tokens(node, made.get(number))} for number, node in enumerate(nodes)]


def _tokens(node: Row, row: Row | None) -> Row:
    if row is None:
        return {"token_ids": [], "mask": [], "is_content": [], "logprobs": []}
    mask = [flag and node["sampled"] for flag in row["mask"]]
    return {"token_ids": row["token_ids"], "mask": mask, "is_content": row["is_content"], "logprobs": []}


def openai_message(message: Mapping[str, Any]) -> Row:
    """Return a message in the form that chat templates are written for, without fields that are null."""
    calls = message.get("tool_calls") or []
    named = [call if "function" in call else _function(call) for call in calls]
    kept = {name: value for name, value in message.items() if value is not None and name != "provider_state"}
    return {**kept, "content": message.get("content") or "", **({"tool_calls": named} if named else {})}


def _function(call: Mapping[str, Any]) -> Row:
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call.get("id", ""), "type": "function", "function": function}


def _tool_schemas(tools: Sequence[Mapping[str, Any]]) -> list[Row] | None:
    """Return tools in the form that chat templates are written for; None for none, which templates tell from []."""
    functions = [{name: each[name] for name in TOOL_FIELDS if each.get(name) is not None} for each in tools]
    bare = [{"type": "function", "function": function} for function in functions]
    return [dict(tool) if "function" in tool else new for tool, new in zip(tools, bare, strict=True)] or None


MARK = "imported"
"""The field of a record that says where a trace was read; what our own runs sampled has none."""


def trace_rows(trace: Mapping[str, Any], context: ImportContext, place: Mapping[str, Any]) -> tuple[Row, list[Row]]:
    """Return a trace as a row of traces, without the columns of its assignment, and as rows of messages.

    `place` says where it was read; it is kept in the record. Raises Unfit where the trace cannot be rows.
    """
    nodes = trace.get("nodes")
    if isinstance(nodes, list):
        nodes = [_whole_node(node) if isinstance(node, dict) else node for node in nodes]
    check_trace(trace, nodes, context.vocab_size)
    assert nodes is not None
    temperature = sampling_temperature(trace)
    tokens = origin_of(nodes, temperature)
    if tokens == RENDERED:
        nodes = render_tokens(nodes, trace.get("tools") or [], context.render)
    if tokens != SAMPLED:
        nodes = [{**node, "logprobs": [0.0] * sum(node["mask"])} for node in nodes]
    whole = {"ok": not trace.get("errors"), "errors": [], "is_timeout": False, "stop_condition": None}
    whole |= {"rewards": {}, "metrics": {}, "info": {}, **trace, "nodes": nodes}
    messages = message_rows(whole)
    row = _row(_with_timing(whole), tokens, 1.0 if temperature is None else temperature)
    mark = {"tokens": tokens, "temperature": "unknown"} if temperature is None else {"tokens": tokens}
    return _with_record(row, messages, trace, {**mark, **place}), messages


def _whole_node(node: Row) -> Row:
    lists = {name: node.get(name) or [] for name in ("token_ids", "mask", "is_content", "logprobs")}
    return {"parent": None, "sampled": False, **node, **lists}


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
    said = {_temperature(value) for value in calls if isinstance(value, (int, float))}
    # One column for the trace: log-probs at two temperatures cannot share a ratio.
    if len(said) > 1:
        raise Unfit("calls of one trace differ in temperature", ", ".join(map(str, sorted(said))))
    config = mapping(mapping(trace.get("agent")).get("config"))
    general = mapping(config.get("sampling")).get("temperature")
    return said.pop() if said else _temperature(general) if isinstance(general, (int, float)) else None


def _temperature(value: Any) -> float:
    return checked_number(value, "temperature", 0, LARGEST_TEMPERATURE)


def with_failure(row: Row, failure: Failure) -> Row:
    """Return a row of traces with an error in place of its reward."""
    return {**row, "reward": None, **error_columns(failure)}


def empty_row(trace_id: str) -> Row:
    """Return the row of a rollout that left no trace, its error apart."""
    trace: Row = {"id": trace_id, "nodes": [], "rewards": {}, "metrics": {}, "info": {}, "stop_condition": None}
    return {**_row(_with_timing(trace), "", 1.0), "policy_key": NO_POLICY, "record": "{}"}


def _row(trace: Row, tokens: str, temperature: float) -> Row:
    masks = [flag for node in trace["nodes"] for flag in node["mask"]]
    return {
        **outcome_columns(trace, failure_of_trace(trace) if "ok" in trace else None),
        **{name: compact(trace[name]) for name in ("rewards", "metrics", "info")},
        "trace_id": trace["id"],
        "policy_key": UNKNOWN_POLICY if tokens == SAMPLED else NO_POLICY,
        "temperature": temperature,
        "num_input_tokens": masks.count(False),
        "num_output_tokens": masks.count(True),
    }


def _with_timing(trace: Row) -> Row:
    """Return a trace with the fields that say who played it and how long, where it has none."""
    agent, timing = mapping(trace.get("agent")), mapping(trace.get("timing"))
    calls = map(mapping, trace.get("calls") or [])
    spans = {name: _span(timing.get(name)) for name in ("boot", "setup", "agent", "scoring")}
    return {
        **trace,
        "agent": {**agent, "name": agent.get("name") or "agent", "trainable": bool(agent.get("trainable", True))},
        "timing": {"start": timing.get("start") or 0, **spans},
        "calls": [{"error": None, "finish_reason": None, **call, "time": _span(call.get("time"))} for call in calls],
    }


def _span(span: Any) -> Row:
    start, end = mapping(span).get("start") or 0.0, mapping(span).get("end") or 0.0
    if end:
        checked_number(end - start, "seconds", -LARGEST_SECONDS, LARGEST_SECONDS)
    return {"start": start, "end": end}


def _with_record(row: Row, messages: Sequence[Row], trace: Mapping[str, Any], mark: Row) -> Row:
    rest = {name: value for name, value in trace.items() if name not in TRACE_COLUMNS}
    rest["nodes"] = [{name: node[name] for name in node if name not in NODE_COLUMNS} for node in trace["nodes"]]
    row = {**row, "record": compact({**rest, MARK: mark})}
    # Against what rebuilding gives and not against the columns: only then does nothing get lost.
    patch = difference(_rebuild(row, messages), dict(trace))
    return row if patch is None else {**row, "record": compact({**rest, MARK: {**mark, "patch": patch}})}


def _rebuild(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Row:
    trace = with_short_logprobs(rebuild(row, messages))
    del trace[MARK]
    return trace


SET, REMOVE, INSIDE = "set", "remove", "inside"
"""A patch is `{"set": value}`, or `{"remove": [names], "inside": {name or place: patch}}`; None is no difference."""
Patch = dict[str, Any]


def difference(old: Any, new: Any) -> Patch | None:
    """Return the patch that makes `new` of `old`, or None where they are equal; 1, 1.0 and true are three values."""
    if isinstance(old, dict) and isinstance(new, dict):
        before, after = old, new
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and _holds_objects(new):
        before, after = dict(enumerate(old)), dict(enumerate(new))
    else:
        return None if compact(old) == compact(new) else {SET: new}
    patches = {str(name): difference(before[name], after[name]) for name in after if name in before}
    patches |= {str(name): {SET: after[name]} for name in after if name not in before}
    inside = {name: patch for name, patch in patches.items() if patch is not None}
    removed = [name for name in before if name not in after]
    return {INSIDE: inside} | ({REMOVE: removed} if removed else {}) if inside or removed else None


def _holds_objects(values: list[Any]) -> bool:
    return any(isinstance(value, (dict, list)) for value in values)


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

"""The Responses API of an engine: a sampled reply as its JSON, and as the events of its stream.

verifiers reads requests of this API and keeps their messages (`ResponsesDialect`); its client of an engine answers chat
completions alone. The shapes are those of https://platform.openai.com/docs/api-reference/responses.
"""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiers.v1.types import Response

Item = dict[str, Any]
Event = tuple[str, Mapping[str, Any]]


def response_body(response: "Response", model: str) -> dict[str, Any]:
    """Return a reply as a response of the API: an item for reasoning, one for the text, one for each tool call."""
    usage = response.usage
    num_input, num_output = (usage.input_tokens, usage.completion_tokens) if usage else (0, 0)
    is_cut = response.finish_reason == "length"
    return {
        "id": f"resp_{response.id}",
        "object": "response",
        "created_at": response.created,
        "model": model,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": list(_items(response)),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        },
    }


def _items(response: "Response") -> Iterator[Item]:
    message, name = response.message, response.id
    if message.reasoning_content:
        summary = [{"type": "summary_text", "text": message.reasoning_content}]
        yield {"type": "reasoning", "id": f"rs_{name}", "summary": summary}
    if message.content or not message.tool_calls:
        content: list[Item] = [
            {"type": "output_text", "text": message.content or "", "annotations": [], "logprobs": []}
        ]
        yield {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": content}
    for call in message.tool_calls or ():
        about = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "status": "completed"}
        yield {**about, "name": call.name, "arguments": call.arguments}


def stream_events(_: Any, body: dict[str, Any]) -> list[bytes]:
    """Return the server-sent events of a whole response, in place of a method of verifiers' dialect."""
    events: list[Event] = [("response.created", {"response": {**body, "status": "in_progress", "output": []}})]
    for index, item in enumerate(body["output"]):
        events += _item_events(item, {"output_index": index, "item_id": item["id"]})
    events.append((f"response.{body['status']}", {"response": body}))
    lines = [
        json.dumps({"type": kind, "sequence_number": number, **data}) for number, (kind, data) in enumerate(events)
    ]
    return [f"data: {line}\n\n".encode() for line in (*lines, "[DONE]")]


def _item_events(item: Item, place: Item) -> Iterator[Event]:
    """Yield the events of one item: it begins empty, gets its text at once, and is done."""
    index = {"output_index": place["output_index"]}
    if item["type"] == "function_call":
        yield "response.output_item.added", {**index, "item": {**item, "arguments": ""}}
        yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
        done = {**place, "arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", done
    else:
        field, text, part, number = _PARTS[item["type"]]
        (content,) = item[field]
        place = {**place, number: 0}
        yield "response.output_item.added", {**index, "item": {**item, field: []}}
        yield f"response.{part}.added", {**place, "part": {**content, "text": ""}}
        yield f"response.{text}.delta", {**place, "delta": content["text"], "logprobs": []}
        yield f"response.{text}.done", {**place, "text": content["text"], "logprobs": []}
        yield f"response.{part}.done", {**place, "part": content}
    yield "response.output_item.done", {**index, "item": item}


_PARTS = {
    "message": ("content", "output_text", "content_part", "content_index"),
    "reasoning": ("summary", "reasoning_summary_text", "reasoning_summary_part", "summary_index"),
}

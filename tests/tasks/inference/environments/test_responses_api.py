"""A reply as the Responses API has it: what OpenAI's own client reads of it, and what comes back as history."""

import json

import pytest
from openai.types.responses import Response as OpenAiResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from verifiers.v1.dialects import ResponsesDialect
from verifiers.v1.graph import message_hash
from verifiers.v1.types import AssistantMessage, Response, ToolCall, Usage

from tasks.inference.environments.responses_api import response_body, stream_events

pytestmark = pytest.mark.engine

CALLS = [ToolCall(id=f"call_{number}", name="look", arguments='{"at":  "this"}') for number in range(2)]
REPLIES = {
    "text": AssistantMessage(content="said"),
    "nothing": AssistantMessage(content=None),
    "calls": AssistantMessage(content=None, tool_calls=CALLS),
    "all": AssistantMessage(content="said", reasoning_content="thought", tool_calls=CALLS),
}


def body(message, finish="stop"):
    """The response of a message."""
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    response = Response(id="r", created=1, model="m", message=message, finish_reason=finish, usage=usage)
    return response_body(response, "m")


@pytest.mark.parametrize("name", REPLIES)
def test_openai_s_client_reads_every_item_whole_and_streamed(name):
    whole = body(REPLIES[name])
    read = OpenAiResponse.model_validate(whole)
    assert read.output_text == (REPLIES[name].content or "")
    lines = b"".join(stream_events(None, whole)).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    told = [TypeAdapter(ResponseStreamEvent).validate_python(event) for event in events]
    assert [event.sequence_number for event in told] == list(range(len(told)))
    assert told[0].response.output == [] and told[-1].response == read
    assert [event.item.type for event in told if event.type == "response.output_item.done"] == [
        item.type for item in read.output
    ]


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_that_comes_back_is_the_message_that_was_sampled(name):
    history = [{"role": "user", "content": "one"}, *body(REPLIES[name])["output"], {"role": "user", "content": "two"}]
    _, reply, _ = ResponsesDialect().parse_request({"input": history}).messages
    assert message_hash(reply) == message_hash(REPLIES[name])


def test_a_reply_that_was_cut_is_incomplete():
    cut = body(REPLIES["text"], "length")
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert b'"response.incomplete"' in stream_events(None, cut)[-2]


def test_the_patch_of_streams_is_still_needed():
    with pytest.raises(KeyError, match="content"):
        ResponsesDialect().stream_events(body(REPLIES["calls"]))

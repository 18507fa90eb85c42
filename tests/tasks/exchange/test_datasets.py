"""Datasets: supervised samples branch by branch."""

import json

import pytest

from tasks.exchange.datasets import NotText, samples
from tests.fixtures.builders import message, trace


def said(name, number, parent, role, text, sampled=False, **more):
    """Return a message with its text in its body."""
    body = json.dumps({"role": role, "content": text, **more})
    return message(name, number, parent=parent, sampled=sampled, role=role, body=body, content=None)


def test_every_branch_is_a_sample_up_to_its_last_answer():
    messages = [
        said("t", 0, None, "user", "q"),
        said("t", 1, 0, "assistant", "a", sampled=True),
        said("t", 2, 1, "user", "more"),
        said("t", 3, 0, "assistant", "b", sampled=True),
        said("t", 4, 0, "user", "nobody answered"),
    ]
    rows = list(samples(trace("t", reward=0.5), messages))
    assert [row["branch"] for row in rows] == [0, 1]
    assert [[one["content"] for one in row["messages"]] for row in rows] == [["q", "a"], ["q", "b"]]
    assert {(row["trace_id"], row["reward"], row["example_id"]) for row in rows} == {("t", 0.5, "e0")}


def test_calls_and_reasoning_are_kept_in_the_form_of_chat_templates():
    call = {"id": "c", "type": "function", "name": "add", "arguments": "{}"}
    messages = [
        said("t", 0, None, "user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        said("t", 1, 0, "assistant", None, sampled=True, tool_calls=[call], reasoning_content="hm"),
        said("t", 2, 1, "tool", "4", tool_call_id="c"),
        said("t", 3, 2, "assistant", "4", sampled=True),
    ]
    (row,) = samples(trace("t"), messages)
    made = row["messages"]
    assert made[0]["content"] == "a\nb"
    assert made[1]["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    assert made[1]["reasoning_content"] == "hm" and made[2]["tool_call_id"] == "c"
    assert [*made[0]] == ["role", "content"]


def test_pictures_are_refused():
    picture = said("t", 0, None, "user", [{"type": "image_url", "image_url": {"url": "x"}}])
    with pytest.raises(NotText, match="trace t, message 0"):
        list(samples(trace("t"), [picture, said("t", 1, 0, "assistant", "a", sampled=True)]))

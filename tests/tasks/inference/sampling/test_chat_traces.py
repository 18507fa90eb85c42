"""Traces of chat APIs: text without tokens is a response there, and nowhere else."""

from typing import Any

import pytest

from tasks.inference.trace_rows.failures import failure_of_trace, is_chat_only


def ended(kind: str, **message: Any) -> dict[str, Any]:
    """A faultless trace of one model call that shows no tokens."""
    node = {"sampled": True, "mask": [], "message": {"role": "assistant", "content": None} | message}
    return {
        **{"ok": True, "errors": [], "is_timeout": False, "stop_condition": "stop", "rewards": {}},
        "agent": {"config": {"client": {"type": kind}}},
        "nodes": [{"sampled": False, "mask": [], "message": {"role": "user", "content": "question"}}, node],
    }


@pytest.mark.parametrize("message", [{"content": "answer"}, {"tool_calls": [{"name": "look"}]}])
def test_text_or_a_call_is_a_response_of_a_chat_api(message: dict[str, Any]) -> None:
    assert is_chat_only(ended("eval")) and failure_of_trace(ended("eval", **message)) is None


def test_a_chat_api_that_says_nothing_fails_like_an_engine() -> None:
    found = failure_of_trace(ended("eval"))
    assert found is not None and (found.kind, found.type) == ("model", "EmptyResponse")


def test_text_without_tokens_is_no_response_of_an_engine() -> None:
    for trace in (ended("train", content="answer"), ended("train", content="answer") | {"agent": {}}):
        found = failure_of_trace(trace)
        assert not is_chat_only(trace) and found is not None and found.type == "EmptyResponse"

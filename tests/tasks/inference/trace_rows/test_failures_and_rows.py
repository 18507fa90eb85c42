"""Classes of failures, what is advised, and the parts of rows that need no engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.schemas.stage_tables import MESSAGES, TRACES
from tasks.inference.trace_rows.failures import Failure, add_advice, failure_of_trace, is_chat_only, kind_of
from tasks.inference.trace_rows.rows import RolloutOrigin, rebuild, row_without_trace, spread_logprobs, trace_tables

ASSIGNMENT = {"assignment_id": "g/0", "group_id": "g", "environment": "e", "example_id": "x", "member": 0, "seed": 1}


@pytest.mark.parametrize(
    ("kind", "status", "message", "expected"),
    [
        ("ProviderError", 503, "connection refused", "infrastructure"),
        ("ProviderError", None, "reset", "infrastructure"),
        ("ProviderError", 429, "slow down", "infrastructure"),
        ("ProviderError", 400, "bad parameter", "model"),
        ("HarnessError", None, "502: Engine response choice.logprobs must be an object.", "model"),
        ("SandboxError", None, "no space", "infrastructure"),
        ("TunnelError", None, "down", "infrastructure"),
        ("TimeoutError", None, "late", "timeout"),
        ("TaskError", None, "KeyError: planted", "environment"),
        ("MemoryError", None, "", "environment"),
    ],
)
def test_the_class_of_a_recorded_error(kind, status, message, expected):
    assert kind_of({"type": kind, "status_code": status, "message": message}) == expected


def test_only_what_may_go_better_is_tried_again():
    kinds = ("infrastructure", "timeout", "model", "environment", "cancelled", "incomplete")
    assert [Failure(kind, "T", "m").retryable for kind in kinds] == [True, True, True, False, False, False]


ASKED = [{"sampled": False, "mask": [False]}]
"""The prompt of a seat that gave no reply."""


def finished(**changes):
    """A trace of one sampled message that went well, but for `changes`."""
    node = {"sampled": True, "mask": [False, True]}
    whole = {"ok": True, "errors": [], "is_timeout": False, "stop_condition": "done", "nodes": [node]}
    return {**whole, "rewards": {"r": {"score": 0.5, "weight": 1.0}}, **changes}


@pytest.mark.parametrize(
    ("changes", "kind", "name"),
    [
        ({"ok": False, "errors": [{"type": "TaskError", "message": "m"}], "nodes": []}, "environment", "TaskError"),
        ({"ok": False, "nodes": []}, "incomplete", "Incomplete"),
        ({"is_timeout": True}, "timeout", "TimeoutError"),
        ({"nodes": [], "rewards": {}}, "incomplete", "NothingSampled"),
        ({"nodes": ASKED, "stop_condition": "max_input_tokens"}, "incomplete", "NothingSampled"),
        ({"nodes": ASKED, "calls": [{}]}, "incomplete", "NothingSampled"),
        ({"nodes": [], "rewards": {"r": None}}, "incomplete", "NotScored"),
        ({"nodes": [{"sampled": True, "mask": [False]}]}, "model", "EmptyResponse"),
        ({"rewards": {"r": None}}, "incomplete", "NotScored"),
        ({"rewards": {"r": {"score": float("nan"), "weight": 1.0}}}, "environment", "NonFiniteReward"),
        ({"rewards": {"r": {"score": float("inf"), "weight": 0.0}}}, "environment", "NonFiniteReward"),
        ({"rewards": {"r": {"score": -1e308, "weight": 1.0}}}, "environment", "NonFiniteReward"),
        ({"rewards": {n: {"score": 2e38, "weight": 1.0} for n in "ab"}}, "environment", "NonFiniteReward"),
    ],
)
def test_what_is_wrong_with_a_trace(changes, kind, name):
    failure = failure_of_trace(finished(**changes))
    assert failure is not None
    assert (failure.kind, failure.type) == (kind, name)


def test_nothing_is_wrong_with_a_finished_trace():
    assert failure_of_trace(finished()) is None
    for nodes in ([], ASKED):
        assert failure_of_trace(finished(nodes=nodes, calls=[])) is None, "a seat that never had to move is no failure"


LOGPROB = st.floats(max_value=0, allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(st.booleans(), LOGPROB)))
def test_log_probs_lie_where_the_mask_is_set(tokens):
    sampled = [logprob for is_sampled, logprob in tokens if is_sampled]
    spread = spread_logprobs(sampled, [is_sampled for is_sampled, _ in tokens])
    assert list(spread) == [logprob if is_sampled else 0.0 for is_sampled, logprob in tokens]


def test_a_log_prob_too_few_is_refused():
    with pytest.raises(AssertionError, match="1 log-probs for 2 sampled tokens"):
        spread_logprobs([-1.0], [True, False, True])


def test_a_rollout_that_left_no_trace_is_a_row():
    origin = RolloutOrigin(ASSIGNMENT, "policy", 3, 5, 0.7)
    row = row_without_trace(Failure("timeout", "TimeoutError", "too long"), origin, 1.5, 2.0)
    made = trace_tables([row], [])
    assert made["traces"].schema.equals(TRACES.arrow) and made["messages"].schema.equals(MESSAGES.arrow)
    (stored,) = made["traces"].to_pylist()
    assert stored["reward"] is None and stored["error_class"] == "timeout" and stored["error_traceback"] is None
    assert (stored["staleness"], stored["policy_version"], stored["assignment_id"]) == (2, 3, "g/0")
    assert rebuild(stored, []) == {}


def ended(kind, **message):
    """A faultless trace of one model call that shows no tokens."""
    node = {"sampled": True, "mask": [], "message": {"role": "assistant", "content": None} | message}
    return {
        **{"ok": True, "errors": [], "is_timeout": False, "stop_condition": "stop", "rewards": {}},
        "agent": {"config": {"client": {"type": kind}}},
        "nodes": [{"sampled": False, "mask": [], "message": {"role": "user", "content": "question"}}, node],
    }


@pytest.mark.parametrize(
    ("kind", "changes", "is_chat", "failure"),
    [
        ("eval", {"content": "answer"}, True, None),
        ("eval", {"tool_calls": [{"name": "look"}]}, True, None),
        ("eval", {}, True, "EmptyResponse"),
        ("train", {"content": "answer"}, False, "EmptyResponse"),  # text without tokens is no response of an engine
        ("", {"content": "answer"}, False, "EmptyResponse"),
    ],
)
def test_text_or_a_call_is_a_response_of_a_chat_api_alone(kind, changes, is_chat, failure):
    trace = ended(kind, **changes) if kind else ended("train", **changes) | {"agent": {}}
    found = failure_of_trace(trace)
    assert is_chat_only(trace) == is_chat and (found.type if found else None) == failure


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)", "unset HF_HUB_OFFLINE, or load"),
        ("Couldn't reach 'a/b' on the Hub (LocalEntryNotFoundError)", "mend the network"),
        ("Dataset 'a/b' doesn't exist on the Hub or cannot be accessed.", "set HF_TOKEN"),
        ("Dataset 'a/b' is a gated dataset on the Hub. Visit its page to ask for access.", "set HF_TOKEN"),
        ("Qwen3Renderer does not support process_multimodal=False", "the renderer of this model takes text alone"),
        ("vLLM multimodal placeholders do not align with renderer prompt", "the policy has sampled a token"),
    ],
)
def test_an_error_is_followed_by_what_the_user_can_do(said, advice):
    assert add_advice(said).startswith(f"{said}; ") and advice in add_advice(said)
    assert add_advice(said).count("; ") == 1 + ("the policy has" in advice), "one advice"

"""Lines that we write of our own runs: verifiers' form, and the same messages, tokens and errors when they are read."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.exchange.episodes import ImportContext, compact
from tasks.exchange.verifiers_lines import line_of, read_episode
from tests.fixtures.builders import example, exchange, failed, message, trace
from tests.tasks.exchange.lines import ORIGIN

ASSIGNMENT = {"assignment_id": "3-1/2", "group_id": "3-1", "member": 2, "seed": 11}
ASSIGNMENT |= {"environment": "reverse", "example_id": "e0"}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
SAME_COLUMNS = ("trace_id", "message", "parent", "role", "content", "sampled", "token_ids", "mask")


def there_and_back(rows, messages, **of_example):
    """Write the line of an episode, spell it as JSON, and read it as any other file of verifiers."""
    task = example() | {"task": '{"prompt":"x"}'} | of_example
    line = json.loads(compact(line_of("run", 3, rows, messages, ASSIGNMENT, task)))
    return read_episode(line, ORIGIN, ImportContext(render=lambda *_: []), None)


@st.composite
def graphs(draw):
    """Draw the messages of a trace, with tokens; bodies may be spelt in ways that no dump of ours would."""
    rows = []
    num_messages = draw(st.integers(1, 4))
    for number in range(num_messages):
        sampled, text = number == num_messages - 1 or draw(st.booleans()), draw(TEXTS)
        role = "assistant" if sampled else "user"
        body = draw(st.sampled_from(["{}", compact({"role": role, "content": text})]))
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4))
        scores = [draw(st.floats(-90, 0, width=32)) if sampled else 0.0 for _ in tokens]
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        values = {"parent": parent, "tokens": tokens, "sampled": sampled, "logprobs": scores}
        rows.append(message("t0", number, body=body, content=text, role=role, **values))
    return rows


def same(row):
    """Return what must come back of a message; log-probs as the single precision numbers that tables hold."""
    return {name: row[name] for name in SAME_COLUMNS} | {"logprobs": np.float32(row["logprobs"]).tolist()}


@settings(max_examples=30)
@given(graphs(), st.booleans())
def test_messages_and_their_tokens_are_read_as_they_were_sampled(own, with_record):
    record = {"task": {"type": "T", "data": {"prompt": "x"}}, "nodes": [{"timestamp": 1.5} for _ in own]}
    row = trace("t0", record=compact(record) if with_record else "{}", rewards='{"r":{"score":0.5,"weight":1.0}}')
    found = there_and_back([row], {"t0": own})
    assert [same(each) for each in found.messages] == [same(each) for each in own]
    (only,) = found.traces
    assert (only["trace_id"], only["reward"], only["error_class"]) == ("t0", 0.5, None)
    assert (found.group, found.step, found.environment, found.split) == ("3-1", 3, "reverse", "train")


def test_the_line_is_one_that_verifiers_knows():
    rows = [trace("t0", policy_version=3, reward=0.5)]
    line = line_of("run", 3, rows, {"t0": exchange("t0")}, ASSIGNMENT, example())
    assert set(line) == {"id", "env", "task", "group", "run", "ok", "is_timeout", "errors", "traces"}
    assert line["run"]["work"] == {"type": "train", "step": 3, "policy": {"start": 3, "end": 3}}
    assert line["group"] == {"id": "3-1"} and line["ok"]
    (only,) = line["traces"]
    assert [node["token_ids"] for node in only["nodes"]] == [[1, 2, 3], [4, 5]]
    assert only["nodes"][1]["logprobs"] == [-1.0, -1.0] and only["nodes"][0]["logprobs"] == []


def test_a_rollout_without_a_trace_is_an_error_of_its_episode():
    line = line_of("run", 0, [failed("t0")], {}, ASSIGNMENT, example())
    assert not line["ok"] and line["traces"] == [] and line["errors"][0]["type"] == "TimeoutError"
    (only,) = there_and_back([failed("t0")], {}).traces
    assert (only["error_class"], only["reward"]) == ("timeout", None)


def test_an_attempt_at_a_held_out_example_says_so():
    assert there_and_back([trace("t0")], {"t0": exchange("t0")}, split="eval").split == "eval"


def test_a_reward_that_was_no_finite_number_comes_back_as_the_same_failure():
    """Of others such a reward is refused: a trace of ours says beside it that it failed."""
    rewards = '{"r":{"score":NaN,"weight":1.0}}'
    row = failed("t0", error_class="environment", error_type="NonFiniteReward", record='{"ok":true}', rewards=rewards)
    own = exchange("t0")
    record = {"task": {"type": "T", "data": {"prompt": "x"}}, "ok": True, "nodes": [{} for _ in own]}
    (only,) = there_and_back([row | {"record": compact(record)}], {"t0": own}).traces
    assert (only["error_class"], only["error_type"], only["reward"]) == ("environment", "NonFiniteReward", None)
    assert only["rewards"] == rewards

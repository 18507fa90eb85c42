"""What rollouts said, as values and on pages: prompts once, folded turns, what was expected."""

import json

import pytest

from flows.queries.reader import CHARACTERS, LINES
from tests.fixtures.builders import example, failed, message, trace
from tests.flows.viewer.hand_made import RUN, HandMade, batch, credit, update
from tests.flows.viewer.looking import pluck, values

LONG = "\n".join(f"line {number}" for number in range(LINES + 5))
ODD = "a,b <b>&\x1b[31m"
"""A trace's id that has to be quoted wherever it stands."""
PARTS = {"exact": {"score": 0.5, "weight": 0.5}, "form": {"score": 0.25, "weight": 1.0}}
STEP = f"/runs/{RUN}/steps/0"


def exchange(name, asked, said):
    return [message(name, 0, content=asked), message(name, 1, parent=0, content=said, sampled=True)]


def conversation():
    """Two turns: a call of a tool and its result stand between the prompt and the reply."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "look"}}]}
    return [
        message("talk", 0, content="What is seven?"),
        message("talk", 1, parent=0, content=None, body=json.dumps(call), sampled=True),
        message("talk", 2, parent=1, role="tool", content="7 it is"),
        message("talk", 3, parent=2, content="seven", sampled=True),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A step of two groups: two replies and a conversation; the reply of another agent, and one that failed."""
    made = HandMade(tmp_path_factory.mktemp("read") / "store")
    tasks = {"e0": {"prompt": "What is seven?", "answer": 7, "id": "x"}, "e1": {"prompt": "?", "text": "tfel"}}
    made.work("examples", {"examples": [example(name) | {"task": json.dumps(task)} for name, task in tasks.items()]})
    second = {"example_id": "e1", "group_id": "g1"}
    traces = [
        trace("first", reward=0.5, rewards=json.dumps(PARTS)),
        trace("second", reward=1.0),
        trace("talk", reward=0.25),
        trace("other", reward=0.0, agent="judge", trainable=False, **second),
        failed(ODD, **second),
    ]
    messages = [
        *exchange("first", "What is seven?", "The answer is seven."),
        *exchange("second", "What is seven?", "The result is seven."),
        *conversation(),
        *exchange("other", "Turn it", LONG),
        message(ODD, 0, content="Turn it"),
    ]
    sample = credit("first", 0, (0, 1), {"rl_weights": [0.0, 1.0], "advantages": [0.0, 0.5]})
    made.step(traces, messages, [sample], batches=[batch([sample])], updates=[update()])
    return made.reader


def read(library, **query):
    return values(library, STEP, **query)["read"]


def names(found):
    return pluck(found["replies"], "trace_id")


def test_a_prompt_stands_once_over_its_replies(library):
    found = read(library)
    assert (
        names(found) == ["first", "second", "talk", "other", ODD]
        and found["num_rollouts"] == 5
        and found["num_agents"] == 2
    )
    prompts = [each["prompt"] and each["prompt"]["head"] for each in found["replies"]]
    assert prompts == ["What is seven?", None, "What is seven?\n7 it is", "Turn it", None]
    heads = [each["reply"] and each["reply"]["head"] for each in found["replies"]]
    assert heads[:2] == ["The answer is seven.", "The result is seven."] and heads[3:] == ["line 0", ""]
    assert "look" in heads[2] and heads[2].endswith("seven")


def test_a_reply_has_what_was_expected_and_what_it_earned(library):
    found = read(library)["replies"]
    expected = [pluck(each["expected"], "name", "head") for each in found]
    assert expected == [[("answer", "7")]] * 3 + [[("text", "tfel")]] * 2
    assert pluck(found[0]["parts"], "name", "product") == [("exact", 0.25), ("form", 0.25)]
    told = pluck(found, "reward", "advantage", "outcome", "error_class")
    assert told[0::4] == [(0.5, 0.5, "trained", None), (None, None, "errored", "timeout")]


def test_replies_of_others_are_folded(library):
    other = next(each["reply"] for each in read(library)["replies"] if each["trace_id"] == "other")
    assert f"{other['head']}\n{other['rest']}" == LONG, "of an agent that is not trained a line is seen"


@pytest.mark.parametrize("text", [LONG, "x" * 3 * CHARACTERS, "\n" * 100, ""], ids=["lines", "one line", "empty", "no"])
def test_no_long_text_is_lost(hand, text):
    hand.step([trace("t")], exchange("t", text, text))
    (found,) = read(hand.reader)["replies"]
    head, rest = found["reply"]["head"], found["reply"]["rest"]
    assert head.count("\n") < LINES and len(head) <= CHARACTERS
    assert text in (head + rest, f"{head}\n{rest}") and found["reply"]["left_out"] == 0

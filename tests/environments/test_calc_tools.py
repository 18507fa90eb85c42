"""The calculator: chains by hand and against a plain evaluation, demonstrations, and rollouts of six turns."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_calc_tools.demonstrations import demonstrations
from sample_calc_tools.sums import Chain, calculated, chains, is_right, num_chains, progress, prompt, steps, tagged
from sample_calc_tools.taskset import asked
from sample_calc_tools.words import SCHEMA

from tests.environments.scripted import calling, played
from tests.fixtures.commands import cases

pytestmark = pytest.mark.engine

CHAIN = Chain(27, ("+4", "*3", "-9"))


def test_a_chain_by_hand():
    assert CHAIN.calls == ["27+4", "31*3", "93-9"] and CHAIN.results == [31, 93, 84]
    assert prompt(CHAIN) == "Work out 27 +4 *3 -9"


@given(st.integers(1, 6), st.integers(0, 10**6))
def test_every_chain_stays_in_range_and_is_what_python_makes_of_it(num_calls, seed):
    for chain in chains(3, num_calls, seed):
        expression = str(chain.first)
        for operation, result in zip(chain.operations, chain.results, strict=True):
            expression = f"({expression}){operation}"
            assert eval(expression) == result and 0 <= result <= 99
        assert [calculated(call) for call in chain.calls] == [str(result) for result in chain.results]
        assert len(chain.calls) == num_calls


def test_chains_are_counted_seeded_and_stable_as_they_grow():
    # From 10 to 90 every operand may be added and subtracted but for the borders; products up to 99 come on top.
    brute = sum(len(steps(number)) for number in range(10, 100))
    assert (
        num_chains(1)
        == brute
        == sum(
            1
            for number in range(10, 100)
            for operand in range(2, 10)
            for result in (number + operand, number - operand, number * operand)
            if 0 <= result <= 99
        )
    )
    first = list(chains(50, 2, seed=4))
    assert len(set(first)) == 50 and list(chains(80, 2, seed=4))[:50] == first != list(chains(50, 2, seed=5))
    assert len(list(chains(num_chains(1) // 2, 1, seed=0))) == num_chains(1) // 2
    with pytest.raises(ValueError, match=f"there are {brute}, and at most half"):
        next(chains(num_chains(1) // 2 + 1, 1, seed=0))


@pytest.mark.parametrize(
    ("asked", "answer"),
    [("7+5", "12"), (" 7 * 5 ", "35"), ("3-5", "-2")]
    + [(wrong, "error: want one operation, as in 7+5") for wrong in ("", "7", "7/5", "7+5+1", "-7+5", "a+b", "7+")],
)
def test_what_the_calculator_answers(asked, answer):
    assert calculated(asked) == answer


@cases(__file__, "calculations")
def test_progress_counts_calls_in_order(calls, num_done):
    assert progress(calls, CHAIN.calls) == num_done


def test_the_answer_of_a_reply():
    assert is_right("so <ans> 84 </ans>", 84) and is_right(tagged(84), 84)
    assert not any(is_right(reply, 84) for reply in ("84", "<ans>84", "<ans>8</ans><ans>84</ans>", "<ans>084</ans>"))


@pytest.mark.parametrize(
    ("arguments", "asked_for"),
    [
        ('{"expression": "7+5"}', "7+5"),
        ('{"expression": 7}', "7"),
        ("{}", ""),
        ("[]", ""),
        ("{", ""),
        ('{"expression": ' + "1" * 5000 + "}", ""),
        ("[" * 100_000, ""),
    ],
)
def test_what_was_asked_whatever_the_arguments_are(arguments, asked_for):
    call = SimpleNamespace(name="calc", arguments=arguments)
    message = SimpleNamespace(role="assistant", tool_calls=[call])
    trace = SimpleNamespace(branches=[SimpleNamespace(messages=[message])])
    assert asked(trace) == [asked_for]


def test_demonstrations_take_four_forms():
    forms = Counter()
    for row, chain in zip(demonstrations(2000, seed=7), chains(2000, 2, 7), strict=True):
        opening, *said = row["messages"]
        assert opening["content"] == prompt(chain) and json.loads(row["tools"]) == [SCHEMA]
        made = [json.loads(c["function"]["arguments"])["expression"] for m in said for c in m.get("tool_calls", ())]
        right = is_right(said[-1]["content"], chain.results[-1])
        forms["right" if made == chain.calls and right else f"{len(made)} calls"] += 1
    assert forms["right"] / 2000 == pytest.approx(0.3, abs=0.04)
    assert all(forms[form] / 2000 == pytest.approx(0.7 / 3, abs=0.04) for form in ("0 calls", "1 calls", "2 calls"))
    assert forms.total() == 2000 and len(forms) == 4
    with pytest.raises(ValueError, match="a share from 0 to 1"):
        next(demonstrations(1, seed=0, right=1.1))


@pytest.mark.nightly
def test_six_turns_are_five_calls_and_an_answer():
    def reply(body):
        told = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        assert body["tools"] == [SCHEMA], "the server offers what demonstrations show"
        first, *operations = body["messages"][0]["content"].removeprefix("Work out ").split()
        number = told[-1] if told else first
        if len(told) < len(operations):
            return calling("calc", expression=number + operations[len(told)])
        return tagged(number if int(first) % 2 else -1)

    settings = {"id": "sample_calc_tools", "num_examples": 8, "num_calls": 5}
    episodes, bodies = played(settings, ["agent"], reply, together=True)
    assert len(bodies) == 6 * len(episodes) == 48
    traces = [episode.traces[0] for episode in episodes]
    assert not [trace.errors for trace in traces if trace.errors]
    assert {(trace.num_turns, len(trace.branches), trace.metrics["num_calls"]) for trace in traces} == {(6, 1, 5.0)}
    # All calls are right; the answer is given by those that begin with an odd number.
    assert {(trace.task.data.first % 2, trace.reward) for trace in traces} == {(1, 1.0), (0, 0.5)}
    assert all(trace.rewards["steps"].score == 1.0 for trace in traces)

"""The calculator: chains by hand and against a plain evaluation, demonstrations, and rollouts of six turns."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_calc_tools.sums import Chain, calculated, chains, is_right, progress, prompt, tagged
from sample_calc_tools.taskset import asked

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

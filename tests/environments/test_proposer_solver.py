"""Proposer and solver: problems and replies by hand, what is earned, and whole episodes of scripted models."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_proposer_solver.sums import (
    Problem,
    beginnings,
    difficulty,
    is_right,
    problem_of,
    proposed,
    question,
    request,
)
from sample_proposer_solver.taskset import (
    RULES_OF_PROPOSER,
    RULES_OF_SOLVER,
    ProposerSolverConfig,
    ProposerSolverTaskset,
)

from tests.environments.scripted import SEED, played

pytestmark = pytest.mark.engine

SEATS = ("proposer", "solver")
SETTINGS = {"id": "sample_proposer_solver", "num_solvers": 4, "largest": 9}


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("5", Problem(7, "+", 5)),
        (" 0\n", Problem(7, "+", 0)),
        ("10", None),  # too large
        ("05", None),
        ("-5", None),
        ("7+5", None),  # the beginning again
        ("5=12", None),
        ("5+1", None),
        ("\u0665", None),  # a digit of another script
        ("1" * 5000, None),  # longer than what Python takes for a number
        ("", None),
    ],
)
def test_a_proposal_is_a_number_that_is_allowed_or_none(reply, problem):
    assert proposed(reply, "7+", 9) == problem


@pytest.mark.parametrize(
    ("reply", "right"),
    [("12", True), (" 12 ", True), ("012", False), ("12.", False), ("twelve", False), ("", False), ("1" * 5000, False)],
)
def test_an_answer_is_the_number_alone(reply, right):
    assert is_right(reply, Problem(7, "+", 5)) is right


@given(st.integers(0, 99), st.sampled_from("+-"), st.integers(0, 99))
def test_every_problem_can_be_proposed(first, operator, second):
    problem = Problem(first, operator, second)
    assert proposed(str(second), f"{first}{operator}", 99) == problem_of(problem.text) == problem
    assert proposed(str(second), f"{first}{operator}", second - 1) is None
    assert is_right(str(eval(problem.text)), problem) and not is_right(str(problem.answer + 1), problem)


def test_a_proposal_is_worth_most_where_half_were_right():
    assert [difficulty(right, 4) for right in range(5)] == [0, 0.5, 1, 0.5, 0]
    assert [difficulty(right, 3) for right in range(4)] == pytest.approx([0, 2 / 3, 2 / 3, 0])
    assert [difficulty(right, 1) for right in range(2)] == [0, 0]


def test_tasks_are_requests_by_beginning():
    def load(**settings):
        return list(ProposerSolverTaskset(ProposerSolverConfig(id="sample_proposer_solver", **settings)).load())

    tasks = load(largest=2)
    assert [task.key for task in tasks] == ["0+", "1+", "2+", "0-", "1-", "2-"] == [*beginnings(2)]
    assert tasks[4].data.prompt == request("1-", 2) == "Set 1-? to 2"
    assert {task.data.system_prompt for task in tasks} == {None}
    assert {task.data.system_prompt for task in load(explain_rules=True)} == {RULES_OF_PROPOSER}


def episodes_of(replies, **settings):
    """Play one request to begin with `7+`, with these replies of each seat."""
    told = {seat: iter(said) for seat, said in replies.items()}
    return played(
        SETTINGS | settings, SEATS, lambda body: next(told[body["model"]]), lambda task: int(task.key == "7+")
    )


def rewards(episode):
    """What every run earned, None where it was not scored."""
    for trace in episode.traces:
        assert list(trace.rewards) == ["outcome"], "scored once"
    return [(trace.agent.name, trace.reward if trace.rewards["outcome"] else None) for trace in episode.traces]


@pytest.mark.parametrize(
    ("answers", "worth"),
    [(["12", "12", "11", "x"], 1.0), (["12"] * 4, 0.0), (["12", "1", "2", "3"], 0.5), (["1"] * 4, 0.0)],
)
def test_solvers_earn_by_being_right_and_the_proposer_by_their_dissent(answers, worth):
    (episode,), bodies = episodes_of({"proposer": ["5"], "solver": answers})
    assert episode.ok and rewards(episode) == [
        ("proposer", worth),
        *(("solver", float(each == "12")) for each in answers),
    ]
    proposer = episode.traces[0]
    assert proposer.metrics == {"valid": 1, "solve_rate": answers.count("12") / 4}
    asked = [body["messages"] for body in bodies]
    assert asked == [
        [{"role": "user", "content": request("7+", 9)}],
        *[[{"role": "user", "content": question(Problem(7, "+", 5))}]] * 4,
    ]


def test_every_run_samples_with_a_seed_of_its_own():
    _, bodies = episodes_of({"proposer": ["5"], "solver": ["12"] * 4})
    assert [body["seed"] for body in bodies] == [SEED + number for number in range(5)]


def test_what_is_no_problem_ends_the_episode_and_earns_nothing():
    (episode,), bodies = episodes_of({"proposer": ["77"], "solver": []})
    assert episode.ok and not episode.errors and len(bodies) == 1
    assert rewards(episode) == [("proposer", 0)]
    assert episode.traces[0].metrics == {"valid": 0} and "parse_errors" not in episode.traces[0].info


def test_a_solver_that_failed_leaves_the_proposer_unscored_and_the_others_scored():
    (episode,), _ = episodes_of({"proposer": ["5"], "solver": ["12", 400, "11", "12"]})
    assert rewards(episode) == [("proposer", None), ("solver", 1), ("solver", None), ("solver", 0), ("solver", 1)]
    assert [bool(trace.errors) for trace in episode.traces] == [False, False, True, False, False]
    assert "solve_rate" not in episode.traces[0].metrics and not episode.ok


def test_solvers_are_told_the_rules_where_that_is_asked_for():
    _, bodies = episodes_of({"proposer": ["5"], "solver": ["12"]}, explain_rules=True, num_solvers=1)
    systems = [body["messages"][0]["content"] for body in bodies]
    assert systems == [RULES_OF_PROPOSER, RULES_OF_SOLVER]

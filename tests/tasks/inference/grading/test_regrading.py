"""Scores of recorded traces: what they are, what becomes of those that fail, and what cannot be scored again."""

import asyncio
import json

import pytest

from configs.environments import EnvironmentConfig
from tasks.inference.grading.client import NotRegradable
from tests.fixtures import sampled
from tests.fixtures.hosts import PLUGINS, assigned, examples_of, served
from tests.fixtures.recorded import example_of, rows_of, scored, trace_of
from tests.fixtures.sampled import sample

pytestmark = pytest.mark.engine

STRICTER = PLUGINS / "stricter.py"
REPLIES = ("<rev>cba</rev>", "<rev>cb</rev>", "<rev>abc</rev>", "cba", "")
SCORED = ("trace_id", "reward", "rewards", "metrics", "info", "error_class")
REWARDS = [1.0, 0.8, pytest.approx(1 / 3), 0.0, 0.0]


@pytest.fixture(autouse=True)
def judges_as_before(monkeypatch, plugins):
    """A grader forbids judges in its whole process; here that ends with the test."""
    from verifiers.v1.judge import Judge

    monkeypatch.setattr(Judge, "complete", Judge.complete)


def regraded(environment, rows, examples):
    """Return the scores that a grader of this process gives."""
    from tasks.inference.grading.host import Grader

    tables = [table.to_pylist() for table in (examples, rows["traces"], rows["messages"])]
    return asyncio.run(Grader(environment.model_dump(mode="json")).score(*tables))


def reverse(**taskset):
    return EnvironmentConfig(name="reverse", taskset={"id": "sample_reverse_text", "num_examples": 4, **taskset})


def reversals():
    """Rows of five answers to one text, as verifiers scores them."""
    from sample_reverse_text.taskset import ReverseTextData, ReverseTextTask

    task = ReverseTextTask(ReverseTextData(prompt="Reverse inside <rev>: abc", text="abc"))
    return rows_of({str(i): [scored(trace_of(task, [reply]), task)] for i, reply in enumerate(REPLIES)}, "reverse")


def duel():
    return EnvironmentConfig(name="duel", taskset={"id": "duel"})


def bout(fault, **left):
    """Rows of one episode of the duel, in which nothing was scored: a long and a short answer, and the critic's."""
    import duel

    task = duel.DuelTask(duel.DuelData(prompt="say much", fault=fault))
    faultless = duel.DuelTask(duel.DuelData(prompt="say much"))
    judging = duel.CriticTask(duel.vf.TaskData(prompt="judge them"), notes=[])
    members = [
        trace_of(task, ["word", "words"], "left", id="left", **left),
        trace_of(faultless, ["me"], "right", id="right"),
        trace_of(judging, ["left"], "critic", id="critic"),
    ]
    return rows_of({"bout": members}, "duel")


def test_unchanged_functions_give_what_is_recorded():
    rows = reversals()
    assert rows["traces"]["reward"].to_pylist() == REWARDS
    found = regraded(reverse(), rows, example_of("reverse", "{}"))
    assert [[row[name] for name in SCORED] for row in found] == [
        [row[name] for name in SCORED] for row in rows["traces"].to_pylist()
    ]


def test_a_changed_function_gives_exactly_its_own_values():
    changed = reverse(task={"rewards": {"similarity": {"fn": f"{STRICTER}:exactly", "weight": 3.0}}})
    found = regraded(changed, reversals(), example_of("reverse", "{}"))
    assert [row["reward"] for row in found] == [3.0, 0.0, 0.0, 0.0, 0.0]
    assert json.loads(found[0]["rewards"]) == {"similarity": {"score": 1.0, "weight": 3.0}}
    assert json.loads(found[0]["metrics"]) == {"exact": 1.0}


def test_several_agents_are_scored_each_and_then_compared():
    left, right, critic = regraded(duel(), bout("none"), example_of("duel", '{"prompt":"say much"}'))
    assert (left["reward"], right["reward"], critic["reward"]) == (2 * 5 + 1.0, 2 * 2 + 0.0, 0.25)
    assert json.loads(left["rewards"]) == {
        "length": {"score": 5.0, "weight": 2.0},
        "won": {"score": 1.0, "weight": 1.0},
    }
    assert json.loads(left["metrics"]) == {"turns": 2.0} and json.loads(critic["metrics"]) == {}


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [("raises", "environment", "KeyError: 'planted'"), ("nan", "environment", "is nan"), ("hangs", "timeout", "")],
)
def test_a_trace_whose_scoring_fails_is_errored(fault, kind, message, monkeypatch):
    from verifiers.v1.env import Env

    if fault == "hangs":  # the others are done at once, but for that long a machine may be busy with other things
        monkeypatch.setattr("tasks.inference.grading.host.SCORING_SECONDS", 5.0)
    monkeypatch.setattr("duel.DuelEnv.finalize", Env.finalize)
    left, right, critic = regraded(duel(), bout(fault), example_of("duel", "{}"))
    assert left["reward"] is None and left["error_class"] == kind and message in left["error_message"]
    assert (right["reward"], right["error_class"], critic["reward"]) == (4.0, None, 0.25)


def test_who_is_compared_with_a_failed_trace_has_no_reward_either():
    found = regraded(duel(), bout("raises"), example_of("duel", "{}"))
    assert [row["reward"] for row in found] == [None] * 3 and {row["error_class"] for row in found} == {"environment"}
    assert "left" in found[1]["error_message"] and "KeyError" in found[0]["error_message"]


def test_a_comparison_that_raises_counts_for_every_trace():
    found = regraded(duel(), bout("none"), example_of("duel", '{"fault":"worse"}'))
    assert {row["error_message"] for row in found} == {"DuelEnv.finalize(): ValueError: nobody wins"}
    assert [row["reward"] for row in found] == [None] * 3


def test_an_errored_trace_stays_one_and_is_still_seen_by_the_comparison():
    error = [{"type": "TaskError", "message": "the recorded one"}]
    rows = bout("none", ok=False, errors=error, rewards={"length": {"score": 50.0, "weight": 1.0}})
    assert rows["traces"]["error_class"].to_pylist() == ["environment", None, None]
    right, critic = regraded(duel(), rows, example_of("duel", "{}"))
    assert json.loads(right["rewards"])["won"] == {"score": 0.0, "weight": 1.0}
    assert (right["reward"], critic["reward"]) == (4.0, 0.25)


def test_a_trace_that_loses_every_reward_is_errored():
    rows = bout("none", rewards={"old": {"score": 1.0, "weight": 1.0}})
    silent = EnvironmentConfig(name="duel", taskset={"id": "silent"})
    left, right, _ = regraded(silent, rows, example_of("duel", "{}"))
    assert (left["error_class"], left["error_type"], left["reward"]) == ("environment", "NotScored", None)
    assert "it had old" in left["error_message"]
    assert (right["error_class"], right["reward"], right["rewards"]) == (None, None, "{}"), "it never had one"


@pytest.mark.parametrize(("fault", "why"), [("state", "state .'artifacts'"), ("judge", "judge 'judge' asks a model")])
def test_what_was_not_recorded_is_refused(fault, why):
    with pytest.raises(NotRegradable, match=f"environment 'duel' cannot be regraded: .*{why}"):
        regraded(duel(), bout(fault), example_of("duel", "{}"))


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"judges": [{"id": "reference"}]}, "judge 'reference' asks a model"),
        ({"rewards": {"boxed": {"fn": f"{STRICTER}:in_the_box"}}}, "reward 'boxed' needs the rollout's runtime"),
    ],
)
def test_settings_that_need_more_than_a_trace_are_refused(task, why):
    with pytest.raises(NotRegradable, match=why):
        regraded(reverse(task=task), reversals(), example_of("reverse", "{}"))


def test_a_function_that_cannot_be_loaded_is_no_fault_of_a_trace():
    absent = reverse(task={"rewards": {"r": {"fn": f"{STRICTER}:absent"}}})
    with pytest.raises(TypeError, match="absent"):
        regraded(absent, reversals(), example_of("reverse", "{}"))


@pytest.mark.nightly
@pytest.mark.usefixtures("plugins")
def test_real_rollouts_of_several_turns_are_scored_as_they_were(small_engine, view, tmp_path, monkeypatch):
    from verifiers.v1.judge import Judge

    from tasks.inference.grading.host import Grader

    environment = EnvironmentConfig(name="two", taskset={"id": "two_turns"})
    examples = examples_of(environment)
    with served(environment, tmp_path) as told:
        assignments = assigned("two", ["t0", "t1"], 2)
        groups = sample(small_engine.url, told["address"], view(environment), assignments, examples)
    traces, messages = sampled.rows_of(groups, "traces"), sampled.rows_of(groups, "messages")
    assert [row["reward"] for row in traces] == [2.0] * 4, "the server is gone, the rollouts are recorded"
    monkeypatch.setattr(Judge, "complete", Judge.complete)  # a grader forbids it in its whole process
    grader = Grader(environment.model_dump(mode="json"))
    found = asyncio.run(grader.score(examples.to_pylist(), traces, messages))
    assert [[row[name] for name in SCORED] for row in found] == [[row[name] for name in SCORED] for row in traces]

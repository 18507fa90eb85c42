"""Scores of recorded traces: what they are, what becomes of those that fail, and what cannot be scored again."""

import asyncio
import json
import socket

import pytest

from configs.environments import EnvironmentConfig
from tasks.inference.environments.agent_runs import MAX_STATE_BYTES, record_state
from tests.fixtures import sampled
from tests.fixtures.hosts import PLUGINS, assigned, examples_of, served
from tests.fixtures.recorded import example_of, rows_of, scored, trace_of
from tests.fixtures.sampled import sample

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("plugins")]

STRICTER = PLUGINS / "stricter.py"
REPLIES = ("<rev>cba</rev>", "<rev>cb</rev>", "<rev>abc</rev>", "cba", "")
SCORED = ("trace_id", "reward", "rewards", "metrics", "info", "error_class")
REWARDS = [1.0, 0.8, pytest.approx(1 / 3), 0.0, 0.0]


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


def duel_task(**data):
    import duel

    return duel.DuelTask(duel.DuelData(prompt="say much", **data))


def duel():
    return EnvironmentConfig(name="duel", taskset={"id": "duel"})


def bout(fault, **left):
    """Rows of one episode of the duel, in which nothing was scored: a long and a short answer, and the critic's."""
    import duel

    task, faultless = duel_task(fault=fault), duel_task()
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


def test_a_look_at_a_state_without_record_is_an_error_of_that_trace(monkeypatch):
    from verifiers.v1.env import Env

    monkeypatch.setattr("duel.DuelEnv.finalize", Env.finalize)
    left, right, critic = regraded(duel(), bout("state"), example_of("duel", "{}"))
    assert (left["error_class"], left["error_type"], left["reward"]) == ("incomplete", "StateNotRecorded", None)
    assert "state ('artifacts')" in left["error_message"]
    assert (right["reward"], critic["reward"]) == (4.0, 0.25)


def test_rewards_read_a_state_that_was_recorded():
    from sample_wikispeedia.taskset import WikispeediaData, WikispeediaTask
    from sample_wikispeedia.walk import Walk

    task = WikispeediaTask(WikispeediaData(prompt="p", start="a", target="c", distance=1))
    environment = EnvironmentConfig(name="walks", taskset={"id": "sample_wikispeedia", "num_examples": 1})
    with_files, too_large, plain = (Walk(trail=["a", "b", "c"]) for _ in range(3))
    with_files.artifacts["/logs"] = b"tar"
    too_large.path = ["a" * MAX_STATE_BYTES]
    members = [scored(trace_of(task, ["go"], state=state), task) for state in (plain, with_files, too_large)]
    for trace in members:
        record_state(trace)
    rows = rows_of({str(number): [trace] for number, trace in enumerate(members)}, "walks")
    assert rows["traces"]["info"].to_pylist() == ["{}"] * 3
    assert rows["traces"]["reward"].to_pylist() == [0.75] * 3
    found = regraded(environment, rows, example_of("walks", "{}"))
    assert [row["reward"] for row in found] == [0.75, None, None]
    assert [row["error_type"] for row in found] == [None, "StateNotRecorded", "StateNotRecorded"]


def test_a_state_that_nobody_declared_is_not_recorded():
    (trace,) = [trace_of(duel_task(), ["word"])]
    record_state(trace)
    assert trace.info == {}


def test_a_reward_that_needs_a_sandbox_is_an_error_beside_those_that_do_not():
    task = {"rewards": {"boxed": {"fn": f"{STRICTER}:in_the_box"}}}
    found = regraded(reverse(task=task), reversals(), example_of("reverse", "{}"))
    assert [(row["error_class"], row["error_type"], row["reward"]) for row in found] == [
        ("incomplete", "NeedsRuntime", None)
    ] * 5
    assert "reward 'boxed' needs the rollout's runtime" in found[0]["error_message"]
    assert [json.loads(row["rewards"])["similarity"]["score"] for row in found] == REWARDS


def test_a_judge_that_does_not_answer_is_an_error_and_no_zero():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        address = bound.getsockname()[1]
    judge = {"id": "reference", "base_url": f"http://127.0.0.1:{address}/v1", "answer_field": "text"}
    *asked, empty = regraded(reverse(task={"judges": [judge]}), reversals(), example_of("reverse", "{}"))
    assert [(row["error_type"], row["reward"]) for row in asked] == [("TaskError", None)] * 4
    assert all("Connection" in row["error_message"] for row in asked)
    assert empty["reward"] == 0.0, "the judge of verifiers asks nothing about an empty reply"


def test_a_function_that_cannot_be_loaded_is_no_fault_of_a_trace():
    absent = reverse(task={"rewards": {"r": {"fn": f"{STRICTER}:absent"}}})
    with pytest.raises(TypeError, match="absent"):
        regraded(absent, reversals(), example_of("reverse", "{}"))


@pytest.mark.nightly
def test_real_rollouts_of_several_turns_are_scored_as_they_were(small_engine, view, tmp_path):
    from tasks.inference.grading.host import Grader

    environment = EnvironmentConfig(name="two", taskset={"id": "two_turns"})
    examples = examples_of(environment)
    with served(environment, tmp_path) as told:
        assignments = assigned("two", ["t0", "t1"], 2)
        groups = sample(small_engine.url, told["address"], view(environment), assignments, examples)
    traces, messages = sampled.rows_of(groups, "traces"), sampled.rows_of(groups, "messages")
    assert [row["reward"] for row in traces] == [2.0] * 4, "the server is gone, the rollouts are recorded"
    grader = Grader(environment.model_dump(mode="json"))
    found = asyncio.run(grader.score(examples.to_pylist(), traces, messages))
    assert [[row[name] for name in SCORED] for row in found] == [[row[name] for name in SCORED] for row in traces]

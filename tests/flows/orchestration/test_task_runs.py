"""What Prefect shows of a run's work: by stage or not at all, and what the ledger had."""

from collections import Counter
from concurrent.futures import CancelledError
from unittest.mock import Mock

import pytest

from flows.orchestration import task_runs
from flows.orchestration.task_runs import MOST_FLAT, MOST_FOUND, MOST_STAGES, TaskRuns, found_message
from tasks.filtering import stage as filtering
from tasks.runtime import prefect_task
from tasks.runtime.prefect_task import StageTask, call_with_retries, describe_ref
from tasks.runtime.stage import Ref
from tests.fixtures.programs import said_by

TAGS = ["stage:rollout", "run:second"]
NUM_STAGES = 7
"""Of a step of the played run."""


def ref(number=0, computed=True, run="first", stage="rollout"):
    rows = (("traces", 128), ("messages", 256))
    return Ref(stage, number, f"26d94296{number:024}", rows, 3281, 0.5, computed, run)


def test_a_result_in_a_line():
    assert describe_ref(ref()) == "128 traces, 256 messages, 3,281 tokens, key 26d94296"
    assert describe_ref(ref(computed=False)).endswith(", key 26d94296, computed by run first")
    assert describe_ref(Ref("gate", 0, "k" * 32, (), 0, 0.0, True)) == "key kkkkkkkk"


def test_much_found_work_in_a_line():
    found = [ref(0, run="a"), ref(1, run="b"), ref(0, run="b", stage="filtering")]
    assert found_message(found) == "3 pieces of work: rollout 2, filtering 1"


class Recorded(StageTask):
    """A stage whose task runs are only counted."""

    def __init__(self):
        super().__init__(filtering.STAGE)
        self.calls = []

    def __call__(self, step, work, label="", tags=()):
        self.calls.append((step, label, tags))
        return work()


@pytest.fixture
def steps(monkeypatch):
    """The task runs of steps, which no server has, in the order in which they begin."""
    made = []

    def begun(step, tags):
        made.append((step, Mock(call=lambda work: work())))
        return made[-1][1]

    monkeypatch.setattr(task_runs, "StepTask", begun)
    return made


@pytest.fixture
def reports(monkeypatch, steps):
    """The task runs that stand for several pieces of work, in a flow run that there is not."""
    made = []
    monkeypatch.setattr(task_runs, "current_flow_run", lambda: "a flow run")

    monkeypatch.setattr(task_runs, "report_cached", lambda message, tags: made.append(message))
    return made


def shows(wanted, num_computed, num_found, reports):
    """Do the work of a plan."""
    shown, task = TaskRuns("second", wanted), Recorded()
    planned = [ref(number, computed=number >= num_found) for number in range(num_computed + num_found)]
    shown.plan(planned)
    for each in planned:
        if each.computed:
            shown.caller(task, each.step, "rollout")(lambda each=each: each)
        else:
            shown.show_found(task, each.step, "rollout", each)
    return shown, task


def test_each_stage_and_what_was_found_is_a_task_run(reports):
    _, task = shows("auto", 2, 3, reports)
    assert [call[:2] for call in task.calls] == [(number, "rollout") for number in range(5)]
    assert all(call[2] == TAGS for call in task.calls)
    assert reports == []


def test_what_was_found_is_one_task_run_where_it_is_much(reports):
    _, task = shows("auto", 1, MOST_FOUND + 1, reports)
    assert [call[0] for call in task.calls] == [MOST_FOUND + 1]
    (message,) = reports
    assert message.startswith(f"{MOST_FOUND + 1} pieces of work: rollout {MOST_FOUND + 1}")


def test_each_step_of_a_longer_run_begins_and_ends_once(reports, steps):
    shown, task = shows("auto", MOST_FLAT + 1, 0, reports)
    assert [step for step, _ in steps] == list(range(MOST_FLAT + 1))
    shown.end_step(0, "reward 1")
    shown.end("failed")
    steps[0][1].end.assert_called_once_with("finished", "reward 1")
    steps[1][1].end.assert_called_once_with("failed", "the run has ended: failed")
    shown.caller(task, MOST_FLAT + 1, "rollout")(ref)  # by a thread that has not heard of the end
    assert len(steps) == MOST_FLAT + 1 and len(task.calls) == MOST_FLAT + 2


def test_a_step_that_prefect_does_not_begin_is_said_and_its_stages_are_done(reports, monkeypatch, caplog):
    monkeypatch.setattr(task_runs, "StepTask", Mock(side_effect=CancelledError))
    _, task = shows("auto", MOST_FLAT + 1, 0, reports)
    assert len(task.calls) == MOST_FLAT + 1
    assert "Prefect begins no task run for step 0: its stages stand by themselves" in caplog.messages


def test_a_long_run_shows_no_stages(reports):
    shown, task = shows("auto", MOST_STAGES + 1, 0, reports)
    assert not shown.shows_stages and task.calls == reports == []


def test_nothing_is_a_task_run_where_none_is_asked_for(reports):
    _, task = shows("none", 2, MOST_FOUND + 1, reports)
    assert task.calls == [] and reports == []


def test_work_without_a_task_run_is_tried_again_where_that_can_help(monkeypatch):
    monkeypatch.setattr(prefect_task, "RETRY_SECONDS", 0.0)
    passes = Mock(side_effect=[ConnectionError("engine"), ConnectionError("engine"), ref()])
    assert call_with_retries(passes) == ref() and passes.call_count == 3
    for error, num_calls in ((ConnectionError("engine"), 3), (ValueError("the user's"), 1)):
        work = Mock(side_effect=error)
        with pytest.raises(type(error)):
            call_with_retries(work)
        assert work.call_count == num_calls


@pytest.mark.engine
def test_prefect_shows_cached_work_figures_tags_events_and_the_log(tmp_path):
    said = said_by("-m", "tests.fixtures.programs.shown", str(tmp_path))
    first, second = said["first"], said["second"]
    assert first["message"].startswith("2 steps, reward 0.51 to 0.44; 16 computed, 0 cached")
    assert second["message"].startswith("3 steps, reward 0.51 to 0.47; 7 computed, 16 cached")
    states = Counter(state for state, *_ in second["tasks"].values())
    assert states == {"Cached": 16, "Completed": NUM_STAGES + 3}
    assert first["parts"] == {}, "a short run is drawn stage by stage"
    parts = Counter(second["parts"].values())
    assert set(parts) == {"step-0", "step-1", "step-2"} and parts["step-2"] == NUM_STAGES
    assert second["parts"]["training-2"] == "step-2" and sum(parts.values()) == 16 + NUM_STAGES
    name, message, tags, _ = second["tasks"]["step-2"]
    assert (name, tags) == ("Completed", ["run:second"]) and f"step 2: {message}" in second["logs"]
    _, message, tags, _ = second["tasks"]["rollout-1"]
    assert "12 traces, " in message and ", 154 tokens, key " in message and message.endswith(", computed by run first")
    assert tags == ["run:second", "stage:rollout"]
    assert "stagecoach" in second["tags"]
    assert ", 137 tokens, key " in second["tasks"]["rollout-2"][1]
    steps = [line.partition(",")[0] for line in second["logs"] if line.startswith("step")]
    assert steps == ["step 0: cached (first)", "step 1: cached (first)", "step 2: reward 0.469"]
    assert second["logs"][1] == "step 0: cached (first), reward 0.508, loss 0.000"
    published = [each for each in second["events"] if each["event"] == "stagecoach.policy.published"]
    assert [each["payload"]["policy"] for each in published] == ["first:0", "first:1", "first:2", "second:3"]
    assert published[-1]["resource"]["prefect.resource.name"] == "second:3"
    ended = [each["payload"] for each in second["events"] if each["event"] == "stagecoach.run.finished"]
    assert [(each["run"], each["ending"]) for each in ended] == [("first", "finished"), ("second", "finished")]
    # Nothing of this is a request for each stage: two runs of 16 and 23 pieces of work make as many requests.
    of_stages = {name: count for name, count in second["requests"].items() if count > NUM_STAGES}
    assert of_stages == {}

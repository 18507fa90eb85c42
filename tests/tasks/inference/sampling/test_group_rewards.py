"""Rewards of whole groups in the rollout stage: the small engine, real servers, and graders in their processes."""

import json

import pytest

from configs.environments import EnvironmentConfig
from configs.replay import ReplayConfig
from configs.run import RunConfig
from flows.services.base import Supervisor
from flows.services.environments import GraderProcesses
from flows.services.process import ServiceFailed
from tasks.rollout.regrade import STAGE
from tests.fixtures.builders import view
from tests.fixtures.hosts import assigned, examples_of
from tests.fixtures.rolled_out import Handed, rolled_out
from tests.fixtures.stages import regrade, through_advantage
from tests.fixtures.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("plugins")]

LONGER = {"function": "whole_groups:longer", "weight": 0.25}


ENVIRONMENT = {"name": "reverse", "taskset": {"id": "sample_reverse_text", "num_examples": 4}}


def done(engine, models, place, handed=None, **group_rewards):
    """Do the stage over two groups; return its environment and examples, what was handed over, and generations."""
    environment = ENVIRONMENT | {"group_rewards": group_rewards}
    examples = examples_of(EnvironmentConfig.model_validate(environment))
    rows = assigned("reverse", examples["example_id"].to_pylist()[:2], 4)
    return environment, examples, *rolled_out(engine, models, place / "services", environment, rows, handed)


@pytest.mark.essential
def test_rewards_of_groups_are_recorded_credited_and_the_same_when_regraded(small_engine, models, tmp_path):
    environment, examples, handed, generations = done(small_engine, models, tmp_path, longer=LONGER)
    assert generations == {"environment reverse": 1, "grader reverse": 1}
    tables = {name: handed.table(name) for name in ("traces", "messages")}
    reply = {row["trace_id"]: row["content"] for row in tables["messages"].to_pylist() if row["sampled"]}
    advantage = {row["trace_id"]: row["advantage"] for row in through_advantage(tables)["samples"].to_pylist()}
    for group in handed.groups.values():
        traces = {row["trace_id"]: row for row in group["traces"].to_pylist()}
        rewards = {name: row["reward"] for name, row in traces.items()}
        for name, row in traces.items():
            longer = sum(len(reply[other]) < len(reply[name]) for other in traces)
            similarity = json.loads(row["rewards"])["similarity"]["score"]
            assert rewards[name] == similarity + 0.25 * longer
            if name in advantage:
                assert advantage[name] == pytest.approx(rewards[name] - sum(rewards.values()) / 4)
    assert len(set(advantage.values())) > 1
    again = RunConfig(environments=[environment], replay=ReplayConfig(run="run", regrade=True))
    with Supervisor("again", tmp_path / "again") as supervisor:
        made = regrade(tables | {"examples": examples}, view(STAGE), graders=GraderProcesses(supervisor, again))
    for name in ("reward", "rewards", "metrics", "error_class"):
        assert made["traces"][name].equals(tables["traces"][name])


@pytest.mark.nightly
def test_a_run_that_ends_before_a_group_is_scored_scores_it_later_and_no_other_again(
    small_engine, models, tmp_path, monkeypatch
):
    handed, calls, scores = Handed(), [], GraderProcesses.scores

    def lost_once(graders, examples, traces, messages):
        calls.append(traces["group_id"][0].as_py())
        if len(calls) == 2:
            until(lambda: handed.groups, str)
            raise ServiceFailed("planted")
        return scores(graders, examples, traces, messages)

    monkeypatch.setattr(GraderProcesses, "scores", lost_once)
    with pytest.raises(ServiceFailed, match="planted"):
        done(small_engine, models, tmp_path, handed, longer=LONGER)
    done(small_engine, models, tmp_path, handed, longer=LONGER)
    assert len(calls) == 3 and calls[1] == calls[2]
    assert len({row["assignment_id"] for row in handed.rows()}) == len(handed.rows()) == 8
    assert all("longer" in row["rewards"] and row["error_class"] is None for row in handed.rows())


@pytest.mark.nightly
def test_a_function_that_ends_its_process_is_an_error_of_the_rows(small_engine, models, tmp_path):
    *_, handed, generations = done(small_engine, models, tmp_path, ends={"function": "whole_groups:ends"})
    assert generations["grader reverse"] == 1 + 2 * 2, "two times in each group"
    assert {(row["reward"], row["error_type"]) for row in handed.rows()} == {(None, "GraderLost")}
    assert len(handed.rows()) == 8 and all("similarity" in row["rewards"] for row in handed.rows())

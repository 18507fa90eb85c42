"""Oversampling in whole runs: as many groups are trained as without it, and every rollout is accounted for."""

from collections import Counter

import pytest

from configs.checks.run import problems
from configs.load import load
from configs.run import RunConfig
from tasks.arrays.group_counts import num_needed
from tasks.inference.sampling.limits import straggler_failure
from tests.fixtures import rehearsal
from tests.fixtures.rehearsal import SMALL, reported

FILTERS = [{"type": "errored"}, {"type": "zero_advantage"}, {"type": "incomplete_group"}]
OVERSAMPLED = {"assignment": SMALL["assignment"] | {"oversampling": 1.5}, "filtering": {"filters": FILTERS}}


def stopped(_, row):
    """Of each group beyond the three that are enough, stop the first two members."""
    if int(row["group_id"].rpartition("-")[2]) < num_needed(5, 1.5) or row["assignment_id"].endswith(("/2", "/3")):
        return {}
    failure = straggler_failure(row["environment"], 1.0)
    error = {"error_class": failure.kind, "error_type": failure.type, "error_message": failure.message}
    return error | {"reward": None}


@pytest.fixture
def steps(root, monkeypatch):
    """The finished steps of a run, as watchers are told of them."""
    rehearsal.play(monkeypatch, rollout=rehearsal.sampled_with(stopped))
    return reported(root, "oversampled", **OVERSAMPLED)


def test_what_is_needed_is_trained_and_the_rest_accounted_for(steps):
    assert len(steps) == 2
    for step in steps:
        # ceil(1.5 x 3) = 5 groups of 4: 3 are trained; of each of the other 2, two are stopped and two filtered.
        found = Counter({(share["outcome"], share["detail"]): share["num_traces"] for share in step["outcomes"]})
        assert found == {("trained", ""): 12, ("filtered", "incomplete_group"): 4, ("stopped", ""): 4}
        metrics = step["metrics"]
        assert metrics["stragglers/all"] == 4 / 20 == metrics["stragglers/reverse_text"]
        assert (metrics["rollouts/all"], metrics["errored_rollout/all"]) == (16, 0)
        assert (metrics["accounting/stopped"], metrics["rollout/all/retokenised_turns"]) == (4, 0)
        assert step["num_traces"] == 20 and "errored" not in {share["outcome"] for share in step["outcomes"]}


def test_without_the_filter_it_is_refused_with_the_reason():
    (line,) = problems_of([{"type": "errored"}, {"type": "zero_advantage"}])
    assert line.startswith("assignment.oversampling: 1.5 begins more groups") and "short rollouts" in line
    watching = [*FILTERS[:2], {"type": "incomplete_group", "enforce": False}]
    assert problems_of(FILTERS) == [] and len(problems_of(watching)) == 1


@pytest.mark.parametrize(("stage", "num_problems"), [("rollout", 1), ("filtering", 1), ("advantage", 0)])
def test_a_replay_that_judges_rollouts_again_needs_the_filter_as_well(stage, num_problems):
    replay = {"kind": "replay", "replay": {"run": "before", "from_stage": stage}}
    found = [line for line in problems_of(FILTERS[:2], **replay) if "oversampling" in line]
    assert len(found) == num_problems
    assert [line for line in problems_of(FILTERS, **replay) if "oversampling" in line] == []


def problems_of(filters, **changes):
    """Return what is wrong with the demo, oversampled and with these filters."""
    content = load(["demo"], []).model_dump()
    content["assignment"]["oversampling"] = 1.5
    return problems(RunConfig.model_validate(content | {"filtering": {"filters": filters}} | changes))

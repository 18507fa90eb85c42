"""What is reported of a step and of a run: outcomes, warnings, metrics, those of tokens with what is known of masks."""

from flows.runtime.step_report import DescribedSteps
from tasks.metrics.warnings import WINDOW
from tests.fixtures import rehearsal

TEN_PAIRS = {"groups_per_step": 10, "group_size": 2}


def test_a_run_with_hardly_anything_to_train_on_says_so(tmp_path, monkeypatch):
    """Nine of ten groups are equal: two rollouts of twenty are left, a tenth, and one more group would be enough."""
    told = []

    def watch(event, facts):
        if event == "note":
            told.append(facts["text"])

    for name, equal in (("low", 9), ("enough", 8)):
        same = rehearsal.sampled_with(lambda number, _, first=2 * equal: {"reward": 1.0} if number < first else {})
        rehearsal.play(monkeypatch, rollout=same)
        for _ in range(2):  # a run that is resumed says nothing again of its finished steps
            (described,) = rehearsal.reported(tmp_path / name, name, watch, steps=1, assignment=TEN_PAIRS)
        assert described["metrics"]["trainable/all/ratio"] == (10 - equal) / 10
        assert described["metrics"]["samples_per_rollout/all"] == 1.0
    (warning,) = told
    assert warning.startswith("step 0: only 2 of 20 rollouts could be trained on; look at the environment")


def test_steps_are_the_same_when_they_were_packed():
    described, steps = DescribedSteps(), [{"step": n, "metrics": {"a": n / 3, "b": None}} for n in range(2 * WINDOW)]
    for step in steps:
        described.append(step)
    assert described.unpack() == steps and described.last == steps[-WINDOW:]

"""What is reported of a step and of a run: outcomes, warnings, metrics, those of tokens with what is known of masks."""

from functools import wraps

import pyarrow.compute as pc
import pytest

from flows.runtime import loop
from flows.runtime.session import record_run
from flows.runtime.step_report import describe
from tasks.runtime.stored_rows import rows_of
from tasks.training import stage as training
from tests.fixtures import builders, rehearsal
from tests.fixtures.builders import table
from tests.fixtures.fixed import ENVIRONMENT

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


def learnt(fraction, with_masks):
    """Return a stand-in for training that leaves statistics: every ratio is 1, every entropy 2."""

    @wraps(rehearsal.trained)
    def train(tables, config, **facts):
        made = rehearsal.trained(tables, config, **facts)
        (update,) = made["updates"].to_pylist()
        made["updates"] = table("updates", [update | {"masked_fraction": fraction}])
        statistics, masks = [], []
        for row in rows_of(tables["batches"]).table().to_pylist():
            for number, sample in enumerate(row["sample_ids"]):
                start, end = row["cu_seqlens"][number : number + 2]
                statistics.append(
                    {"sample_id": sample, "logprobs": row["logprobs"][start:end], "entropies": [2.0] * (end - start)}
                )
                masks.append({"sample_id": sample, "masked": [weight != 0 for weight in row["rl_weights"][start:end]]})
        made["token_statistics"] = table("token_statistics", statistics)
        return made | ({"token_masks": table("token_masks", masks)} if with_masks else {})

    return train


def walked(root, monkeypatch, function=None):
    """Return the metrics of the steps of a small run, and of each how many rl tokens there should be."""
    if function is not None:
        writes = ("updates", "token_statistics", "token_masks")
        stage = builders.stand_in(training.STAGE, function, writes=writes)
        monkeypatch.setitem(rehearsal.STAND_INS, "training", stage)
    session = rehearsal.session_for(root, "small")
    steps = []
    with record_run(session):
        do = rehearsal.Rehearsal(session)
        for finished in loop.train_steps(do, rehearsal.SOURCE):
            described = describe(session.context, finished.step, finished.refs)
            rl = pc.sum(session.context.table("batches", [finished.batch.packing])["rl_tokens"].slice(0, 1)).as_py()
            steps.append({**described["metrics"], "expected": rl})
    return steps


@pytest.mark.parametrize(
    ("fraction", "with_masks", "masked"),
    [(1.0, True, 1.0), (0.0, False, 0.0), (0.5, False, None)],
    ids=["masked", "none masked", "masked before masks were kept"],
)
def test_a_trained_step_has_metrics_of_its_tokens(root, monkeypatch, fraction, with_masks, masked):
    steps = walked(root, monkeypatch, learnt(fraction, with_masks))
    assert len(steps) == 2
    for found in steps:
        assert found["rl_tokens/all"] == found[f"rl_tokens/{ENVIRONMENT}"] == found["expected"] > 0
        assert found[f"entropy/{ENVIRONMENT}"] == 2
        assert found["mismatch_kl/all/max"] == 0
        assert found.get("masked_fraction/all") == masked
        assert ("mismatch_kl_masked/all/mean" in found) == with_masks


def test_a_step_without_statistics_has_none(root, monkeypatch):
    for found in walked(root, monkeypatch):
        assert not [name for name in found if name.startswith(("entropy/", "rl_tokens/", "mismatch_kl/"))]

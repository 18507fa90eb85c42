"""Every loss gives the same update on one rank and on two, in real processes."""

import pytest

from configs.losses import CispoLoss, CustomLoss, GspoLoss, IpoLoss, PpoLoss, SequenceMask, TruncatedImportance
from configs.services import LearnerConfig
from configs.training import TrainingConfig
from tasks.learner.client import Learner
from tests.tasks.learner.processes import train

pytestmark = pytest.mark.engine

LOSSES = {
    "ipo": IpoLoss(threshold=0.001),
    "ppo": PpoLoss(tis=TruncatedImportance(level="sequence", cap=1.1)),
    "cispo": CispoLoss(clip_high=0.5),
    "gspo": GspoLoss(clip_low=0.3, clip_high=0.3, sequence_mask=SequenceMask(low=0.2, high=3.0)),
    "custom": CustomLoss(function="tests.tasks.learner.own_losses:reinforce", arguments={"scale": 0.5}),
}


def updates(address, directory, model_directory, processes):
    """Return the update that each loss makes of the same batch from the same policy, and its statistics."""
    found = {}
    with Learner(address) as learner:
        own = LearnerConfig(processes=processes).model_dump(mode="json")
        for name, loss in LOSSES.items():
            learner.configure(TrainingConfig(learning_rate=1e-2, loss=loss).model_dump(mode="json"), own)
            learner.load("p0", str(model_directory), fresh_optimizer=True)
            found[name] = train(learner, 0, directory / name, processes)
    return found


def test_two_ranks_equal_one_with_every_loss(model_directory, learners, tmp_path):
    one, two = (
        updates(at, tmp_path / str(processes), model_directory, processes) for processes, at in learners.items()
    )
    for name in LOSSES:
        (mine, my_statistics), (other, other_statistics) = one[name], two[name]
        columns = ("loss", "grad_norm", "mismatch_kl", "entropy", "masked_fraction")
        assert [other[key] for key in columns] == pytest.approx([mine[key] for key in columns], rel=1e-6, abs=1e-9)
        nulls = {key for key, value in mine["metrics"].items() if value is None}
        assert nulls == {key for key, value in other["metrics"].items() if value is None}
        known = mine["metrics"].keys() - nulls - {"processes", "threads"}
        same = {key: mine["metrics"][key] for key in known}
        assert {key: other["metrics"][key] for key in known} == pytest.approx(same, rel=1e-5, abs=1e-9)
        assert other_statistics["masked"] == my_statistics["masked"]
    assert len({update["grad_norm"] for update, _ in one.values()}) == len(LOSSES)
    assert sum(update["masked_fraction"] for update, _ in one.values()) > 0

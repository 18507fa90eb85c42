"""Adapters sharded over two ranks: the same policy as on one, and files that one rank goes on from."""

import pytest

from configs.services import LearnerConfig
from configs.training import TrainingConfig
from tasks.learner.client import Learner
from tests.fixtures.packed import batches
from tests.tasks.learner.processes import SAMPLES

pytestmark = pytest.mark.engine

TRAINING = TrainingConfig(learning_rate=1e-2, lora={"rank": 3, "alpha": 6}).model_dump(mode="json")
PLACES = {1: [(0, 0), (0, 1), (0, 2)], 2: [(0, 0), (1, 0), (0, 1)]}
PROBE = [1, 2, 3, 4]


def train(learner, step, directory, processes):
    (update,), _ = learner.train(
        batches([[each] for each in SAMPLES[step]], places=PLACES[processes]),
        step=step,
        policy_key_in=f"p{step}",
        policy_key_out=f"p{step + 1}",
        directory_out=str(directory / f"p{step + 1}"),
        save_optimizer=True,
    )
    return update


def test_two_ranks_train_the_adapter_that_one_does(model_directory, learners, tmp_path):
    found, probes = {}, {}
    for processes, address in learners.items():
        directory = tmp_path / str(processes)
        with Learner(address) as learner:
            learner.configure(TRAINING, LearnerConfig(processes=processes).model_dump(mode="json"))
            learner.load("p0", str(model_directory), fresh_optimizer=True)
            found[processes] = [train(learner, step, directory, processes) for step in range(2)]
            probes[processes] = learner.probe(PROBE)
            if processes == 1:  # what two ranks need is what one has written, and the other way round
                learner.load("p1", str(directory / "p1"), fresh_optimizer=False, base=str(model_directory))
                again = train(learner, 1, tmp_path / "again", 1)
                assert again["weights_sha256"] == found[1][1]["weights_sha256"]
            else:
                learner.load("p1", str(tmp_path / "1" / "p1"), fresh_optimizer=False, base=str(model_directory))
                train(learner, 1, tmp_path / "handed over", 2)
                assert learner.probe(PROBE) == pytest.approx(probes[1], abs=1e-5)
    assert probes[2] == pytest.approx(probes[1], abs=1e-5)
    for one, two in zip(found[1], found[2], strict=True):
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)

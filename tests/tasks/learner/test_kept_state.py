"""What a learner keeps of its newest policies on its machine: exact, of them alone, and never in the way."""

import pytest

from tasks.learner.protocol import LearnerError, state_file
from tests.fixtures.learner_steps import loaded_trainer, new_trainer, resume, step_batches, train_step

pytestmark = pytest.mark.engine
BATCHES = step_batches(4)
TRAINING = {"learning_rate": 1e-2}
ROUNDED = TRAINING | {"dtype": "bfloat16", "policy_dtype": "bfloat16"}


def train(trainer, step, directory):
    (update,), _ = train_step(trainer, step, directory, BATCHES[step], state_directory=str(directory / "kept"))
    return update["weights_sha256"]


def after(world, model_directory, directory, steps, settings):
    """Return a learner that has made some steps, and the digests of its policies."""
    (directory / "kept").mkdir(parents=True)
    trainer = loaded_trainer(world, model_directory, **settings)
    digests = [train(trainer, step, directory) for step in range(steps)]
    trainer._keeper.wait()
    return trainer, digests


@pytest.mark.parametrize("settings", [TRAINING, ROUNDED, TRAINING | {"optimizer": {"type": "muon"}}])
def test_another_learner_goes_on_from_it_exactly(world, model_directory, tmp_path, settings):
    _, whole = after(world, model_directory, tmp_path / "whole", 4, settings)
    after(world, model_directory, tmp_path / "lost", 3, settings)
    again = new_trainer(world, **settings)
    kept = tmp_path / "lost" / "kept"
    resume(again, tmp_path / "lost" / "p3", state_directory=str(kept))
    assert train(again, 3, tmp_path / "lost") == whole[3]
    again._keeper.wait()
    assert {path.name for path in kept.iterdir()} == {state_file(f"p{version}", 0, 1) for version in (3, 4)}


def test_state_of_other_weights_is_refused(world, model_directory, tmp_path):
    after(world, model_directory, tmp_path, 2, ROUNDED)
    again = new_trainer(world, **ROUNDED)
    kept = tmp_path / "kept"
    for file in (kept / state_file("p2", 0, 1), kept / state_file("p3", 0, 1)):
        (kept / state_file("p1", 0, 1)).replace(file) if "p2" in file.name else None
        with pytest.raises(LearnerError, match="has no state of policy"):
            again.load(file.name[:2], str(tmp_path / "p2"), fresh_optimizer=False, state_directory=str(kept))
        assert again.state()["policy_key"] is None


def test_a_full_memory_costs_no_step(world, model_directory, tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tasks.learner.kept_state.save_file", full)
    _, digests = after(world, model_directory, tmp_path, 2, ROUNDED)
    assert len(set(digests)) == 2 and not list((tmp_path / "kept").iterdir())
    assert "was not written, and is not gone back to" in caplog.text


def test_nothing_is_kept_where_state_is_saved_or_nobody_asks(world, model_directory, tmp_path):
    trainer = loaded_trainer(world, model_directory, **TRAINING)
    train_step(trainer, 0, tmp_path, BATCHES[0])
    assert trainer._keeper._last is None

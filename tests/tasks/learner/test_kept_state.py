"""What a learner keeps of its newest policies on its machine: exact, of them alone, and never in the way."""

from threading import Event, Timer
from types import SimpleNamespace

import pytest

from tasks.learner import kept_state
from tasks.learner.protocol import LearnerError, state_file
from tests.fixtures.learner_steps import loaded_trainer, new_trainer, resume, step_batches, train_step
from tests.fixtures.small_disks import mounted

pytestmark = pytest.mark.engine
BATCHES = step_batches(4)
TRAINING = {"learning_rate": 1e-2}
ROUNDED = TRAINING | {"dtype": "bfloat16", "policy_dtype": "bfloat16"}


def train(trainer, step, directory):
    (update,), _ = train_step(trainer, step, directory, BATCHES[step], state_directory=str(directory / "kept"))
    return update["weights_sha256"]


def after(world, model_directory, directory, steps, settings):
    """Return a learner that has made some steps, and the digests of its policies."""
    (directory / "kept").mkdir(parents=True, exist_ok=True)
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


@pytest.fixture
def small_memory(tmp_path):
    """The directory that states are kept in, with room for less than one."""
    yield from mounted(tmp_path / "kept", "64k")


@pytest.mark.parametrize("free", [None, 1 << 40], ids=["room is looked for", "others take the room meanwhile"])
def test_a_full_memory_costs_no_step(free, small_memory, world, model_directory, tmp_path, monkeypatch, caplog):
    if free:
        monkeypatch.setattr("tasks.learner.kept_state.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    _, digests = after(world, model_directory, tmp_path, 2, ROUNDED)
    assert len(set(digests)) == 2 and not list(small_memory.iterdir())
    assert "was not written, and is not gone back to" in caplog.text
    assert ("no room for" in caplog.text) is (free is None), "else it is safetensors that fails"


def test_a_step_waits_with_its_change_and_not_with_its_answer(world, model_directory, tmp_path, monkeypatch):
    gate = Event()
    write = kept_state.save_file
    monkeypatch.setattr(kept_state, "save_file", lambda *arguments: gate.wait(60) and write(*arguments))
    (tmp_path / "kept").mkdir()
    trainer = loaded_trainer(world, model_directory, **TRAINING)
    train(trainer, 0, tmp_path)
    assert not trainer._keeper._last.done()
    opening = Timer(0.5, gate.set)
    opening.start()
    train_step(trainer, 1, tmp_path, BATCHES[1])
    opening.join()
    again = new_trainer(world, **TRAINING)
    resume(again, tmp_path / "p1", state_directory=str(tmp_path / "kept"))  # refused where weights changed meanwhile
    assert train(again, 1, tmp_path / "again") == trainer.state()["weights_sha256"]


def test_nothing_is_kept_where_state_is_saved_or_nobody_asks(world, model_directory, tmp_path):
    trainer = loaded_trainer(world, model_directory, **TRAINING)
    train_step(trainer, 0, tmp_path, BATCHES[0])
    assert trainer._keeper._last is None

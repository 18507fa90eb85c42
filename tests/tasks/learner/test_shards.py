"""Policies in bfloat16: the rounding of what is trained, the same bytes from any number of ranks, one digest."""

import hashlib
import json
import shutil
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save

from configs.run import RunConfig
from configs.training import TrainingConfig
from storage.policies.manifest import digest_files, weights_digest
from storage.refs import File
from tasks.inference.engine.read_back import recorded_sum, sum_files
from tasks.learner import shards
from tasks.learner.checkpoint import MASTER, load_optimizer, weights_sums
from tasks.learner.digest import INDEX_FILE, OPTIMIZER_PREFIX, weight_paths, weights_sha256
from tasks.learner.distributed import World
from tasks.learner.model import load_policy
from tasks.learner.optimizer import new_optimizer
from tasks.learner.protocol import LearnerError
from tasks.runtime.weights_sum import SUMS_FILE, WeightsSum
from tasks.training.policy import PolicyImportInputs, policy_import
from tests.fixtures.learner_steps import loaded_trainer, new_trainer, resume, step_batches, train_step
from tests.fixtures.packed import batches, sample
from tests.fixtures.policies import CPU
from tests.tasks.learner.resharding import SMALL, save_again, through_ranks

pytestmark = pytest.mark.engine
ROUNDED = {"learning_rate": 1e-2, "dtype": "bfloat16", "policy_dtype": "bfloat16"}
BATCHES = step_batches(3)


@pytest.fixture(scope="module")
def by_one(world, model_directory, tmp_path_factory):
    """A policy that one rank wrote, and what it had in memory."""
    made = tmp_path_factory.mktemp("shards") / "one"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_BYTES", SMALL)
        return made, save_again(world, model_directory, made, "bfloat16")


def content(directory, prefix):
    return {
        name: tensor for path in directory.glob(f"{prefix}*.safetensors") for name, tensor in load_file(path).items()
    }


def bytes_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_any_number_of_ranks_writes_the_same_bytes(number, by_one, model_directory, world, tmp_path, monkeypatch):
    made = through_ranks(number, model_directory, tmp_path / "ranks", "bfloat16")
    assert bytes_of(made) == bytes_of(by_one[0]) and len(weight_paths(made)) > number
    monkeypatch.setattr(shards, "SHARD_BYTES", SMALL)
    save_again(world, made, tmp_path / "again", "bfloat16")  # with the state that they wrote
    assert bytes_of(tmp_path / "again") == bytes_of(made)


@pytest.mark.essential
def test_what_is_published_is_the_rounding_of_what_is_trained(by_one):
    made, policy = by_one
    published = content(made, "model")
    trained = {name: parameter.full_tensor() for name, parameter in policy.causal.named_parameters()}
    assert published.keys() == trained.keys()
    assert all(torch.equal(published[name], trained[name].to(torch.bfloat16)) for name in trained)
    assert any(not torch.equal(published[name].float(), trained[name]) for name in trained), "or nothing is rounded"
    state = content(made, OPTIMIZER_PREFIX)
    assert all(torch.equal(state[MASTER + name], trained[name]) for name in trained)


def test_files_are_those_of_safetensors(world, tmp_path):
    tensors = {
        "numbers": torch.arange(7),
        "ä": torch.randn(3, 5).bfloat16(),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "turned": torch.randn(4, 2).T,
    }
    (file,) = shards.write_shards(tensors, "model", tmp_path, world)
    expected = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
    assert (tmp_path / file.path).read_bytes() == expected
    assert (file.size, file.sha256) == (len(expected), hashlib.sha256(expected).hexdigest())


def test_the_digest_is_that_of_a_manifest_and_the_index_is_true(by_one):
    made, _ = by_one
    files = digest_files(made)
    assert weights_sha256(made) == weights_digest(files)
    index = json.loads((made / INDEX_FILE).read_text())
    assert {name: set(load_file(made / name)) for name in set(index["weight_map"].values())} == {
        path.name: {name for name, place in index["weight_map"].items() if place == path.name}
        for path in weight_paths(made)
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["a", "tied", "seeing"])
def test_the_recorded_checksum_is_that_of_the_files(name, dtype, world, models, seeing_model, tmp_path):
    source = (models | {"seeing": seeing_model})[name]
    (tmp_path / SUMS_FILE).write_text("of other weights")
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    save_again(world, tmp_path, tmp_path / "made", dtype)
    for engine, own_head in product({dtype, "bfloat16"}, (False, True)):
        recorded = recorded_sum(tmp_path / "made", engine, own_head=own_head)
        assert recorded == sum_files(tmp_path / "made", engine, own_head=own_head)


def test_copies_of_the_shards_are_summed_once(by_one, monkeypatch):
    made, policy = by_one
    monkeypatch.setattr(World, "gather", lambda _, part: [part])
    files = [weights_sums(policy, World(rank, 2, rank, replicas=2), "bfloat16") for rank in range(2)]
    first, second = (json.loads(file[SUMS_FILE])["bfloat16"] for file in files)
    assert {"bfloat16": first} == json.loads((made / SUMS_FILE).read_text())
    assert {tuple(each) for each in second.values()} == {WeightsSum()}


def test_an_import_leaves_checksums_of_others_behind(model_directory, tmp_path):
    state = {"weights_sha256": "", "probe_token_ids": [1, 2], "proof_length": 0}
    client = SimpleNamespace(state=lambda: state, probe=lambda tokens: [0.0, -1.0])
    learner = SimpleNamespace(turn=nullcontext, load_fresh=lambda *_: client)
    shutil.copytree(model_directory, tmp_path / "theirs")
    (tmp_path / "theirs" / SUMS_FILE).write_text("{}")
    policy_import(PolicyImportInputs(str(tmp_path / "theirs"), tmp_path / "made", "k", learner), RunConfig(name="run"))
    assert {path.name for path in (tmp_path / "made").iterdir()} == {path.name for path in model_directory.iterdir()}


def test_what_is_told_of_files_is_true(world, model_directory, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", SMALL)
    trainer = loaded_trainer(world, model_directory, **ROUNDED)
    (update,), _ = train_step(trainer, 0, tmp_path, BATCHES[0], save_optimizer=True)
    told = [File(**file) for file in trainer.state()["files"]]
    paths = (tmp_path / "p1").glob("*.safetensors")
    assert {file.path: (file.size, file.sha256) for file in told} == {
        path.name: (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths
    }
    assert update["weights_sha256"] == weights_digest(told) == trainer.state()["weights_sha256"]


def test_a_learner_goes_on_exactly_from_what_was_saved(world, model_directory, tmp_path):
    def trained(directory, save_optimizer, reload):
        trainer, digests = loaded_trainer(world, model_directory, **ROUNDED), []
        for step, table in enumerate(BATCHES):
            (update,), _ = train_step(trainer, step, directory, table, save_optimizer)
            digests.append(update["weights_sha256"])
            if reload:
                trainer = new_trainer(world, **ROUNDED)
                resume(trainer, directory / f"p{step + 1}")
        return digests

    whole = trained(tmp_path / "whole", False, reload=False)
    assert whole == trained(tmp_path / "reloaded", True, reload=True) and len(set(whole)) == 3


def test_updates_of_one_step_have_the_digests_that_saving_would_give(world, model_directory, tmp_path):
    rows = [[sample("0a", 9, 0)], [sample("1a", 7, 1)]]
    updates, (only,) = (
        train_step(loaded_trainer(world, model_directory, **ROUNDED), 0, tmp_path / name, table)[0]
        for name, table in (("both", batches(rows, updates=[0, 1])), ("alone", batches(rows[:1])))
    )
    assert updates[0]["weights_sha256"] == updates[1]["weights_sha256_in"] == only["weights_sha256"]


def test_what_was_published_counts_where_weights_behind_it_differ(by_one, tmp_path):
    """As where recorded weights lie beside state that was made again on other kernels."""
    made, settings = by_one[0], TrainingConfig(device="cpu", dtype="bfloat16", policy_dtype="bfloat16")
    policy = load_policy(made, settings, CPU)
    parameter = policy.causal.model.norm.weight
    with torch.no_grad():
        parameter.copy_(torch.full_like(parameter, 3.0))
    load_optimizer(policy, new_optimizer(policy, settings), made)
    assert (parameter.full_tensor() == 3.0).all()


def test_a_family_that_stores_weights_under_other_names_is_refused(world, model_directory, monkeypatch):
    monkeypatch.setattr("tasks.learner.checkpoint.own_tensors", lambda causal: {"fused.weight": torch.zeros(1)})
    with pytest.raises(LearnerError, match=r"stores its weights in another form.*fused.weight"):
        loaded_trainer(world, model_directory, **ROUNDED)

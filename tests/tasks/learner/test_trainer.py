"""The learner without its process: what it reports, what it writes, what it refuses, and that it repeats itself."""

import json

import pyarrow as pa
import pytest
import torch

from configs.training import TrainingConfig
from storage.schemas.stage_tables import TOKEN_STATISTICS, UPDATES
from tasks.learner.checkpoint import PROBE_TEXT, probe_tokens
from tasks.learner.digest import weights_sha256
from tasks.learner.protocol import LearnerError, NoOptimizerState
from tasks.learner.trainer import _device
from tasks.runtime.weights_sum import SUMS_FILE
from tests.fixtures.learner_steps import configure, load_first, new_trainer, resume, train_step
from tests.fixtures.packed import batches, changed, sample

pytestmark = pytest.mark.engine

TRAINING = {"learning_rate": 1e-2, "warmup_steps": 2}
BATCHES = [
    batches([[sample(f"{step}a", 9, step), sample(f"{step}b", 6, step + 50)], [sample(f"{step}c", 7, step + 90, "ce")]])
    for step in range(4)
]


@pytest.fixture
def trainer(world):
    return new_trainer(world, **TRAINING)


@pytest.fixture
def loaded(trainer, model_directory):
    load_first(trainer, model_directory)
    return trainer


def train(trainer, step, directory, table=None, save_optimizer=False):
    return train_step(trainer, step, directory, table or BATCHES[step], save_optimizer)


def test_each_row_each_update_and_each_part_of_saving_is_progress(world, model_directory, tmp_path):
    beats = []
    made = new_trainer(world, lambda: beats.append(None), **TRAINING)
    load_first(made, model_directory)
    assert beats == []
    train(made, 0, tmp_path)
    of_checking = 1  # the rows are one group of their file
    of_saving = 6  # weights, then the optimizer's state gathered; summed; weights, then the rest written; synced
    assert len(beats) == of_checking + BATCHES[0].num_rows + 1 + of_saving


def test_update_and_statistics_are_of_the_contract(loaded, model_directory, tmp_path):
    (update,), statistics = train(loaded, 0, tmp_path, save_optimizer=True)
    assert set(update) == set(UPDATES.arrow.names)
    pa.Table.from_pylist([{**update, "metrics": json.dumps(update["metrics"])}], schema=UPDATES.arrow)
    assert statistics.select(TOKEN_STATISTICS.arrow.names).schema.equals(TOKEN_STATISTICS.arrow)
    assert statistics["sample_id"].to_pylist() == ["0a", "0b", "0c"]
    assert [len(row) for row in statistics["logprobs"].to_pylist()] == [9, 6, 7]
    expected = {"version": 1, "update": 0, "policy_key_in": "p0", "has_optimizer": True, "learning_rate": 5e-3}
    expected |= {"num_rows": 2, "num_tokens": 22, "rl_tokens": 8, "ce_tokens": 4, "ref_kl_tokens": 0}
    assert {name: update[name] for name in expected} == expected
    assert update["weights_sha256_in"] == weights_sha256(model_directory)
    assert update["weights_sha256"] == weights_sha256(tmp_path / "p1") != update["weights_sha256_in"]
    assert update["loss"] == pytest.approx(update["rl_loss"] + update["ce_loss"] + update["ref_kl_loss"])


def test_means_without_tokens_are_null_not_zero(loaded, tmp_path):
    (update,), _ = train(loaded, 0, tmp_path, batches([[sample("a", 6, 1, "ce")]]))
    means = ("entropy", "mismatch_kl", "mismatch_kl_max", "masked_fraction")
    assert [update[name] for name in (*means, "rl_loss")] == [None] * 4 + [0.0]
    (update,), _ = train(loaded, 1, tmp_path, batches([[sample("a", 6, 1)]]))
    assert update["metrics"]["ce_nll_mean"] is None


def test_the_directory_is_a_model_with_its_tokenizer(loaded, model_directory, tmp_path):
    from renderers.base import load_tokenizer
    from transformers import AutoModelForCausalLM

    train(loaded, 0, tmp_path, save_optimizer=True)
    made = tmp_path / "p1"
    source, written = ({path.name for path in directory.iterdir()} for directory in (model_directory, made))
    assert written == source | {"optimizer.safetensors", SUMS_FILE}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (made / name).read_bytes() == (model_directory / name).read_bytes()
    assert json.loads((made / "config.json").read_text()) == json.loads((model_directory / "config.json").read_text())
    assert load_tokenizer(str(made)).encode("hi") == [104, 105]
    _, report = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_the_probe_is_text_by_the_policys_own_tokenizer(loaded, model_directory, tmp_path):
    probe = loaded.state()["probe_token_ids"]
    assert bytes(probe).decode() == PROBE_TEXT, "the model's tokens are bytes"
    assert probe_tokens(model_directory, vocab_size=100) == [], "a tokenizer with tokens that the model lacks"
    assert probe_tokens(tmp_path, vocab_size=512) == []
    train(loaded, 0, tmp_path)
    assert loaded.state()["probe_token_ids"] == probe


def test_a_published_policy_gives_the_probe_of_the_one_in_memory(loaded, tmp_path):
    token_ids = [5, 80, 200, 7, 7, 300]
    before = loaded.probe(token_ids)
    train(loaded, 0, tmp_path)
    after = loaded.probe(token_ids)
    assert loaded.state()["policy_key"] == "p1"
    loaded.load("again", str(tmp_path / "p1"), fresh_optimizer=True)
    assert loaded.probe(token_ids) == after != before
    assert (after[0], len(after)) == (0.0, 6)
    assert all(value < 0 for value in after[1:])


def shas(trainer, steps, directory, save_optimizer=False):
    updates = [train(trainer, step, directory, save_optimizer=save_optimizer)[0] for step in steps]
    return [update["weights_sha256"] for (update,) in updates]


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sign_sgd"])
@pytest.mark.essential
def test_saving_and_loading_in_the_middle_changes_nothing(trainer, model_directory, tmp_path, optimizer):
    choose(trainer, optimizer)
    load_first(trainer, model_directory)
    through = shas(trainer, range(4), tmp_path / "through", save_optimizer=True)
    resume(trainer, tmp_path / "through" / "p2")
    assert shas(trainer, range(2, 4), tmp_path / "resumed") == through[2:]
    trainer.load("p2", str(tmp_path / "through" / "p2"), fresh_optimizer=True)
    assert shas(trainer, range(2, 4), tmp_path / "fresh") != through[2:]


def choose(trainer, optimizer, **settings):
    configure(trainer, **TRAINING, optimizer={"type": optimizer, **settings})


def test_sign_sgd_without_momentum_keeps_nothing_and_goes_on_all_the_same(trainer, model_directory, tmp_path):
    from safetensors.torch import load_file

    choose(trainer, "sign_sgd", momentum=0.0)
    load_first(trainer, model_directory)
    through = shas(trainer, range(3), tmp_path / "through", save_optimizer=True)
    assert load_file(tmp_path / "through" / "p2" / "optimizer.safetensors") == {}
    resume(trainer, tmp_path / "through" / "p2")
    assert shas(trainer, range(2, 3), tmp_path / "resumed") == through[2:]


def test_state_of_another_optimizer_is_refused(trainer, model_directory, tmp_path):
    choose(trainer, "muon")
    load_first(trainer, model_directory)
    train(trainer, 0, tmp_path, save_optimizer=True)
    for other in ("adamw", "sign_sgd"):
        choose(trainer, other)
        with pytest.raises(LearnerError, match="does not fit the model and its optimizer"):
            resume(trainer, tmp_path / "p1")


def test_updates_of_one_batch_are_made_in_turn(trainer, model_directory, tmp_path):
    """Two updates of one batch, one step of warm-up each, equal two steps; and their digests form a chain."""
    load_first(trainer, model_directory)
    apart = shas(trainer, range(2), tmp_path / "apart")
    rows = [[sample(f"{step}a", 9, step), sample(f"{step}b", 6, step + 50)] for step in range(2)]
    tails = [[sample(f"{step}c", 7, step + 90, "ce")] for step in range(2)]
    table = batches([rows[0], tails[0], rows[1], tails[1]], updates=[0, 0, 1, 1])
    load_first(trainer, model_directory)
    updates, statistics = train(trainer, 0, tmp_path / "together", table, save_optimizer=True)
    assert [update["weights_sha256"] for update in updates] == apart
    assert updates[1]["weights_sha256_in"] == apart[0]
    made = [(update["version"], update["update"], update["has_optimizer"]) for update in updates]
    assert made == [(1, 0, False), (1, 1, True)]
    assert [update["learning_rate"] for update in updates] == [5e-3, 1e-2]
    assert statistics["sample_id"].to_pylist() == ["0a", "0b", "0c", "1a", "1b", "1c"]


def test_optimizer_state_that_is_absent_or_another_model_s(trainer, model_directory, tmp_path):
    from tasks.learner.tiny import tiny_qwen3

    with pytest.raises(NoOptimizerState, match="train the recorded batches again"):
        trainer.load("p0", str(model_directory), fresh_optimizer=False)
    with pytest.raises(LearnerError, match="holds none"):
        trainer.probe([1, 2])
    load_first(trainer, model_directory)
    train(trainer, 0, tmp_path, save_optimizer=True)
    other = tiny_qwen3(tmp_path / "other", hidden=32, layers=1)
    (tmp_path / "p1" / "optimizer.safetensors").rename(other / "optimizer.safetensors")
    with pytest.raises(LearnerError, match="does not fit the model"):
        resume(trainer, other)


def test_a_gradient_that_is_not_finite_changes_nothing(loaded, model_directory, tmp_path):
    weights = BATCHES[0]["rl_weights"].to_pylist()[0]
    poison = changed(BATCHES[0], "advantages", [-3e38 if weight else 0.0 for weight in weights])
    with pytest.raises(LearnerError, match="gradient's norm is"):
        train(loaded, 0, tmp_path, poison)
    after_refusal = shas(loaded, range(2), tmp_path / "after")
    load_first(loaded, model_directory)
    assert shas(loaded, range(2), tmp_path / "clean") == after_refusal


def test_refusals_before_anything_changes(loaded, model_directory, tmp_path):
    before = loaded.probe([1, 2, 3])
    with pytest.raises(LearnerError, match="holds 'p0', not policy 'p1'"):
        train(loaded, 1, tmp_path)
    (tmp_path / "p1").mkdir()
    (tmp_path / "p1" / "left-over").touch()
    with pytest.raises(LearnerError, match="not empty"):
        train(loaded, 0, tmp_path)
    alien = changed(BATCHES[0], "token_ids", [512] * 15)
    with pytest.raises(LearnerError, match="the model has 512"):
        train(loaded, 0, tmp_path / "alien", alien)
    with pytest.raises(LearnerError, match="at least two"):
        loaded.probe([1])
    assert (loaded.probe([1, 2, 3]), loaded.state()["policy_key"]) == (before, "p0")


def test_config_is_needed_checked_and_kept(world, loaded):
    from tasks.learner.trainer import Trainer

    with pytest.raises(LearnerError, match="call configure first"):
        Trainer(world).load("p0", "nowhere", True)
    configure(loaded, **TRAINING)
    assert loaded.state()["policy_key"] == "p0"
    configure(loaded, **TRAINING | {"learning_rate": 1.0})
    assert loaded.state()["policy_key"] is None


@pytest.mark.parametrize(("deterministic", "mode"), [(True, "error"), (False, "default")])
def test_on_cuda_a_deterministic_run_takes_no_kernel_that_adds_up_in_any_order(world, monkeypatch, deterministic, mode):
    """A warning would not do: FlashAttention 2 then keeps the backward pass that does."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        assert _device(TrainingConfig(device="cuda", deterministic=deterministic), world).type == "cuda"
        assert torch.get_deterministic_debug_mode() == ["default", "warn", "error"].index(mode)
    finally:
        torch.set_deterministic_debug_mode("default")

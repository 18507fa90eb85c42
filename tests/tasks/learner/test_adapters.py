"""Adapters in the learner: only they are trained and stored, their base stays, and peft reads what was written."""

import json
import shutil

import numpy as np
import pytest
import torch

from storage.policies.manifest import adapter_base
from tasks.learner.digest import over_base, weights_sha256
from tasks.learner.protocol import LearnerError
from tests.fixtures.learner_steps import loaded_trainer, new_trainer, resume, step_batches, train_step
from tests.fixtures.policies import logprobs_by_transformers

pytestmark = [pytest.mark.engine, pytest.mark.essential]

LORA = {"rank": 4, "alpha": 8.0}
TRAINING = {"learning_rate": 1e-2, "lora": LORA}
BATCHES = step_batches(3)
PROBE = [5, 17, 3, 200, 9, 44]
FILES = {"adapter_config.json", "adapter_model.safetensors", "base.json"}


@pytest.fixture
def loaded(world, model_directory):
    return loaded_trainer(world, model_directory, **TRAINING)


def train(trainer, step, directory):
    (update,), _ = train_step(trainer, step, directory, BATCHES[step], save_optimizer=True)
    return update


def by_transformers(model):
    """Return the probe's log-probs as the library computes them."""
    return [0.0, *logprobs_by_transformers(model.eval(), PROBE).tolist()]


def test_a_new_adapter_changes_nothing_bit_for_bit(world, loaded, model_directory):
    plain = loaded_trainer(world, model_directory, learning_rate=1e-2)
    assert loaded.probe(PROBE) == plain.probe(PROBE)
    assert loaded.state()["weights_sha256"] == plain.state()["weights_sha256"] == weights_sha256(model_directory)


def test_a_new_adapter_begins_as_peft_makes_it_of_a_model_in_memory(loaded, model_directory):
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_directory)
    torch.manual_seed(0)
    settings = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    inject_adapter_in_model(settings, model)
    ours = dict(loaded._loaded.policy.causal.named_parameters())
    assert ours.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(ours[name], value) for name, value in model.named_parameters())


def test_a_policy_is_its_adapter_and_names_its_base(loaded, model_directory, tmp_path):
    before = weights_sha256(model_directory)
    first, second = (train(loaded, step, tmp_path) for step in (0, 1))
    assert {path.name for path in (tmp_path / "p2").iterdir()} == FILES | {"optimizer.safetensors"}
    # Not a chain: one step back to whole weights.
    assert adapter_base(tmp_path / "p1") == adapter_base(tmp_path / "p2") == "p0"
    assert first["weights_sha256_in"] == before
    assert first["weights_sha256"] == second["weights_sha256_in"] == over_base(before, weights_sha256(tmp_path / "p1"))
    assert first["weights_sha256"] != second["weights_sha256"]
    assert weights_sha256(model_directory) == before


def test_peft_reads_what_was_written(loaded, model_directory, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    train(loaded, 0, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model_directory)
    untrained = by_transformers(base)
    trained = by_transformers(PeftModel.from_pretrained(base, tmp_path / "p1"))
    assert loaded.probe(PROBE) == pytest.approx(trained, abs=1e-5)
    assert np.abs(np.subtract(trained, untrained)).max() > 1e-3  # else nothing was shown


def test_only_adapters_have_gradients_and_state(loaded, model_directory, tmp_path):
    from safetensors import safe_open

    train(loaded, 0, tmp_path)
    with safe_open(tmp_path / "p1" / "optimizer.safetensors", "pt") as stored:
        names = set(stored.keys()) - {"step"}
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    assert len(names) == 2 * 2 * 7 * 2  # moments, A and B, linear maps of a layer, layers
    frozen = [name for name, p in loaded._loaded.policy.causal.named_parameters() if not p.requires_grad]
    assert "model.embed_tokens.weight" in frozen and "lm_head.weight" in frozen


def test_going_on_from_the_middle_gives_the_same_bytes(world, loaded, model_directory, tmp_path):
    whole = [train(loaded, step, tmp_path / "whole") for step in range(3)]
    again = new_trainer(world, **TRAINING)
    resume(again, tmp_path / "whole" / "p1", base=str(model_directory))
    assert again.state()["weights_sha256"] == whole[0]["weights_sha256"]
    resumed = [train(again, step, tmp_path / "resumed") for step in (1, 2)]
    assert [each["weights_sha256"] for each in resumed] == [each["weights_sha256"] for each in whole[1:]]
    files = [(tmp_path / name / "p3" / "adapter_model.safetensors").read_bytes() for name in ("whole", "resumed")]
    assert files[0] == files[1]


def test_the_seed_decides_where_an_adapter_begins(world, model_directory, tmp_path):
    digests = []
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        trainer = loaded_trainer(world, model_directory, learning_rate=1e-2, lora=LORA | {"seed": seed})
        digests.append(train(trainer, 0, tmp_path / name)["weights_sha256"])
    assert digests[0] == digests[1] != digests[2]


def test_named_modules_alone_are_adapted(world, model_directory, tmp_path):
    lora = LORA | {"target_modules": ["q_proj", "down_proj"]}
    train(loaded_trainer(world, model_directory, lora=lora), 0, tmp_path)
    written = json.loads((tmp_path / "p1" / "adapter_config.json").read_text())
    assert written["target_modules"] == ["down_proj", "q_proj"]


def test_what_does_not_fit_is_refused(world, loaded, model_directory, tmp_path):
    train(loaded, 0, tmp_path)
    adapter, base = str(tmp_path / "p1"), str(model_directory)
    for lora, message in (
        (None, "is an adapter of rank 4 and alpha 8.*export RUN --format weights --to DIR"),
        (LORA | {"rank": 8}, "is an adapter of rank 4 and alpha 8"),
        (LORA | {"alpha": 9.0}, "is an adapter of rank 4 and alpha 8"),
        (LORA | {"target_modules": ["q_proj"]}, "is for the modules"),
    ):
        with pytest.raises(LearnerError, match=message):
            new_trainer(world, lora=lora).load("p1", adapter, fresh_optimizer=True, base=base)
    for modules, message in (
        (["q_proj", "z_proj"], "no linear map is named z_proj"),
        (["lm_head"], "lm_head has the embedding or the output head in it"),  # which check knows by these names alone
        (["embed_tokens"], "embed_tokens has the embedding or the output head in it"),
    ):
        with pytest.raises(LearnerError, match=message):
            loaded_trainer(world, model_directory, lora=LORA | {"target_modules": modules})
    with pytest.raises(LearnerError, match="is not a model directory"):
        loaded.load("none", str(tmp_path / "nowhere"), fresh_optimizer=True)


def test_other_weights_below_are_found(loaded, model_directory, tmp_path):
    from safetensors.torch import load_file, save_file

    train(loaded, 0, tmp_path)
    changed = shutil.copytree(model_directory, tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    for base in (str(changed), ""):
        with pytest.raises(LearnerError, match="Put policy p0 back"):
            loaded.load("p1", str(tmp_path / "p1"), fresh_optimizer=True, base=base)


def test_merged_weights_are_the_policy(loaded, model_directory, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tasks.learner.adapter_tools import merge

    train(loaded, 0, tmp_path)
    merged = tmp_path / "merged"
    merge(model_directory, tmp_path / "p1", merged)
    logprobs = by_transformers(AutoModelForCausalLM.from_pretrained(merged))
    assert logprobs == pytest.approx(loaded.probe(PROBE), abs=1e-5)
    assert AutoTokenizer.from_pretrained(merged).encode("abc")
    assert weights_sha256(merged) != weights_sha256(model_directory)
    assert not {"adapter_config.json", "base.json"} & {path.name for path in merged.iterdir()}

"""Small models of many families learn two steps from a real engine, which computes what the learner computes."""

import pytest

from storage.store import open_store
from tasks.inference.engine.weights_view import read_header
from tests.acceptance.lives import SMALL, stagecoach
from tests.fixtures.driving import rows
from tests.fixtures.family_models import SERVED, SERVED_IN_HALF, quantise, tiny_family

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ESSENTIAL = "gemma3_text"
MARKED = [
    pytest.param(family, marks=pytest.mark.essential if family == ESSENTIAL else pytest.mark.nightly)
    for family in SERVED
]
SETTINGS = ("steps=2", "assignment.groups_per_step=2", "rollout.max_tokens=24", "packing.updates_per_step=1")
NEAR = 1e-4
"""Largest difference between log-probs of engine and learner, in nats."""


def run(model, directory, *settings, status=0):
    """Run the demo's preset with a model; return what it printed."""
    place = [f"--store={directory / 'store'}", "--name=run", "--plain"]
    return stagecoach("run", "demo", SMALL, f"model.path={model}", *place, *SETTINGS, *settings, status=status)


@pytest.mark.parametrize("family", MARKED)
def test_two_steps_are_trained_on_what_the_engine_sampled(family, tmp_path):
    run(tiny_family(tmp_path / "model", family), tmp_path)
    found = rows(open_store(tmp_path / "store"))
    assert sorted(row["version"] for row in found["policies"]) == [0, 1, 2]
    assert len({row["weights_sha256"] for row in found["policies"]}) == 3
    for update in found["updates"]:
        # The estimate is x - log x - 1 of a ratio x: half the square of a small difference.
        assert 0 <= update["mismatch_kl_max"] < NEAR**2 / 2 + 1e-12 and update["rl_tokens"] > 24


@pytest.mark.nightly
@pytest.mark.parametrize("family", SERVED_IN_HALF)
def test_layers_with_a_state_are_sampled_in_half_precision(family, tmp_path):
    model = tiny_family(tmp_path / "model", family)
    said = run(model, tmp_path, status=2)
    assert "engine.dtype: 'float32', and layers of" in said
    run(model, tmp_path, "engine.dtype=bfloat16")
    for update in rows(open_store(tmp_path / "store"))["updates"]:
        assert 0 <= update["mismatch_kl"] < 0.1 and update["rl_tokens"] > 24


@pytest.mark.nightly
def test_a_quantised_checkpoint_is_trained_served_and_exported_in_full(tmp_path):
    model = quantise(tiny_family(tmp_path / "model", "llama"), "fp8")
    run(model, tmp_path)
    for update in rows(open_store(tmp_path / "store"))["updates"]:
        assert 0 <= update["mismatch_kl_max"] < NEAR**2 / 2 + 1e-12 and update["rl_tokens"] > 24
    export = ("--format", "weights", "--to", str(tmp_path / "out"), "--store", str(tmp_path / "store"))
    stagecoach("export", "run", *export)
    names = {*read_header(tiny_family(tmp_path / "plain", "llama") / "model.safetensors")[0]}
    assert names == {*read_header(tmp_path / "out" / "model.safetensors")[0]}
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.nightly
def test_gpt_oss_is_imported_from_mxfp4_and_refused_where_vllm_cannot_train_it(tmp_path):
    """vLLM 0.31 loads sinks and experts once, and its build for CPUs has no adapters beside experts."""
    model = quantise(tiny_family(tmp_path / "model", "gpt_oss"), "mxfp4")
    said = run(model, tmp_path, "training.lora={rank=4, alpha=8}", status=2)
    assert "serves no adapters over a model with experts" in said
    said = run(model, tmp_path, status=2)
    assert "it holds other weights: a reload that kept old ones" in said
    assert {row["version"] for row in rows(open_store(tmp_path / "store"))["policies"]} == {0, 1}


@pytest.mark.nightly
def test_an_engine_that_computes_a_window_otherwise_is_refused(tmp_path):
    """vLLM 0.31 gives the layers of cohere2 one token more."""
    said = run(tiny_family(tmp_path / "model", "cohere2"), tmp_path, status=2)
    assert "computes otherwise: windows" in said and "Nothing was sampled with it" in said

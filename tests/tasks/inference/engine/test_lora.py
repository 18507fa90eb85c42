"""Adapters in a real engine: the right one answers, beside the base in one batch, through swaps and restarts."""

import json
import os

import pytest

from configs.training import LoraConfig
from tasks.inference.engine.checks import EngineMismatch, check_serving, check_weights
from tasks.inference.engine.client import MODEL, EngineError
from tasks.inference.engine.command import adapter_arguments, linear_maps
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.adapter_probes import check_mixed_batch, check_swaps, of_model
from tests.fixtures.hosts import ENGINE, engine_of
from tests.tasks.inference.engine.probes import PROBE, policy_row

pytestmark = pytest.mark.engine

LORA = LoraConfig(rank=4, alpha=16)


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Rows of policies with their directories: a base, another, and adapters a and b over the base."""
    return made(tmp_path_factory.mktemp("lora"), tied=False)


def made(root, tied):
    """Make the policies; those that are tied share their output heads with their embeddings."""
    directories = {name: tiny_qwen3(root / name, seed=seed, tied=tied) for name, seed in (("base", 5), ("other", 6))}
    rows = {name: {**policy_row(name, path), "directory": path} for name, path in directories.items()}
    for seed, name in enumerate("ab"):
        path = adapter(root / name, directories["base"], seed)
        rows[name] = {**policy_row(name, directories["base"], path), "directory": path}
    return rows


def adapter(directory, base, seed):
    """Write an adapter with large random values, as peft writes it."""
    import torch
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    config = PeftConfig(r=LORA.rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    made = get_peft_model(model, config)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    made.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine(policies, tmp_path_factory):
    """An engine over the base that serves adapters."""
    report = tmp_path_factory.mktemp("engine") / "report.json"
    with engine_of(policies["base"]["directory"], report, lora=LORA) as client:
        yield client


def serve(engine, policies, name):
    """Bring the engine to a policy; return a client that asks for it."""
    base = ("base", policies["base"]["directory"]) if name in "ab" else None
    engine.serve(name, policies[name]["directory"], base)
    assert engine.state().policy_key == name
    return of_model(engine, name if base else MODEL)


def test_every_policy_answers_with_its_own_log_probs(engine, policies):
    apart = [abs(x - y) for x, y in zip(policies["a"]["probe_logprobs"], policies["b"]["probe_logprobs"], strict=True)]
    assert max(apart) > 0.1  # else nothing was shown
    for name in ("base", "a", "b", "a", "base", "b", "other", "a"):
        assert check_serving(serve(engine, policies, name), policies[name], ENGINE) < 1e-4


@pytest.mark.nightly
def test_two_workers_say_together_what_one_would(policies, tmp_path, monkeypatch):
    """With tensor parallelism each worker has a part of every matrix."""
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")  # else it wants a NUMA node for each
    config = ENGINE.model_copy(update={"extra_arguments": ("--tensor-parallel-size", "2")})
    base = policies["base"]["directory"]
    with engine_of(base, tmp_path / "report.json", config, lora=LORA) as client:
        for name in ("base", "a", "b", "other"):
            asked = serve(client, policies, name)
            assert check_weights(asked, policies[name], base if name in "ab" else policies[name]["directory"]) is True
        with pytest.raises(EngineMismatch, match="is not that of the policy"):
            check_weights(asked, policies["other"], base)


@pytest.mark.nightly
def test_a_tied_head_is_served_right_below_adapters(tmp_path):
    tied = made(tmp_path, tied=True)
    with engine_of(tied["base"]["directory"], tmp_path / "report.json", lora=LORA) as client:
        for name in ("a", "base", "other", "b"):
            base = ("base", tied["base"]["directory"]) if name in "ab" else None
            client.serve(name, tied[name]["directory"], base)
            assert check_serving(of_model(client, name if base else MODEL), tied[name], ENGINE) < 1e-4


def test_base_and_adapter_in_one_batch_are_both_right(engine, policies):
    base, *adapters = (policies[name] for name in ("base", "a", "b"))
    probed = check_mixed_batch(engine, base, adapters, 1e-4)
    assert probed.passed, probed.detail
    wrong = check_mixed_batch(engine, {**base, "probe_logprobs": policies["b"]["probe_logprobs"]}, adapters, 1e-4)
    assert not wrong.passed, "a base that answers as the adapter does is found out"


def test_adapters_survive_being_swapped(engine, policies):
    base, first, second = (policies[name] for name in ("base", "a", "b"))
    assert check_swaps(engine, base, [first, second], 1e-4).passed
    assert not check_swaps(engine, base, [first, {**second, "directory": first["directory"]}], 1e-4).passed
    same = check_swaps(engine, base, [first, {**first, "policy_key": "b"}], 1e-4)
    assert not same.passed and "too little to tell" in same.detail


def test_an_adapter_that_was_replaced_is_not_served_any_more(engine, policies):
    old = serve(engine, policies, "a")
    serve(engine, policies, "b")
    with pytest.raises(EngineError, match="`a` does not exist"):
        old.score(PROBE, "a")


def test_the_wrong_adapter_is_caught(engine, policies):
    serve(engine, policies, "base")
    engine.serve("b", policies["a"]["directory"], ("base", policies["base"]["directory"]))
    with pytest.raises(EngineMismatch, match="does not serve policy b"):
        check_serving(of_model(engine, "b"), policies["b"], ENGINE)
    with pytest.raises(EngineMismatch, match="does not serve policy a"):  # the base alone is no adapter
        check_serving(engine, policies["a"], ENGINE)


def test_what_cannot_be_loaded_leaves_an_engine_that_says_so(engine, policies, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}))
    with pytest.raises(EngineError, match="load_lora_adapter answered"):
        engine.serve("broken", broken, ("base", policies["base"]["directory"]))
    assert engine.state().policy_key == ""
    assert check_serving(serve(engine, policies, "a"), policies["a"], ENGINE) < 1e-4


def test_the_arguments_name_the_linear_maps_of_the_layers(policies):
    base = policies["base"]["directory"]
    maps = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert linear_maps(base) == maps
    sizes = ["--enable-lora", "--max-loras", "2", "--max-lora-rank"]
    assert adapter_arguments(LORA, base) == [*sizes, "8", "--lora-target-modules", *maps]
    named = LoraConfig(rank=9, target_modules=("q_proj",))
    assert adapter_arguments(named, base) == [*sizes, "16", "--lora-target-modules", "q_proj"]

"""Adapters in a real engine: the right one answers, beside the base in one batch, through swaps and restarts."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from configs.lora import LoraConfig
from tasks.inference.engine import MODEL, Engine, EngineError, EngineMismatch, check_serving
from tasks.inference.lora import arguments, linear_maps
from tasks.learner.tiny import tiny_qwen3
from tests.tasks.inference.hosts import ENGINE, KEY, engine_of
from tests.tasks.inference.test_engine import PROBE, policy_row

pytestmark = pytest.mark.engine

LORA = LoraConfig(rank=4, alpha=16)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def policies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Rows of policies with their directories: a base, another, and adapters a and b over the base."""
    root = tmp_path_factory.mktemp("lora")
    directories = {
        name: tiny_qwen3(root / name, seed=seed, tied=request.param) for name, seed in (("base", 5), ("other", 6))
    }
    rows = {name: {**policy_row(name, path), "directory": path} for name, path in directories.items()}
    for seed, name in enumerate("ab"):
        path = adapter(root / name, directories["base"], seed)
        rows[name] = {**policy_row(name, directories["base"], path), "directory": path}
    return rows


def adapter(directory: Path, base: Path, seed: int) -> Path:
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
def engine(policies: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine over the base that serves adapters."""
    report = tmp_path_factory.mktemp("engine") / "report.json"
    with engine_of(policies["base"]["directory"], report, lora=LORA) as client:
        yield client


def serve(engine: Engine, policies: dict[str, dict[str, Any]], name: str) -> Engine:
    """Bring the engine to a policy; return a client that asks for it."""
    base = ("base", policies["base"]["directory"]) if name in "ab" else None
    engine.serve(name, policies[name]["directory"], base)
    assert engine.served() == name
    return Engine(engine.url, KEY, model=name if base else MODEL)


def test_every_policy_answers_with_its_own_log_probs(engine: Engine, policies: dict[str, dict[str, Any]]) -> None:
    apart = [abs(x - y) for x, y in zip(policies["a"]["probe_logprobs"], policies["b"]["probe_logprobs"], strict=True)]
    assert max(apart) > 0.1  # else nothing was shown
    for name in ("base", "a", "b", "a", "base", "b", "other", "a"):
        assert check_serving(serve(engine, policies, name), policies[name], ENGINE) < 1e-4


def test_base_and_adapter_in_one_batch_are_both_right(engine: Engine, policies: dict[str, dict[str, Any]]) -> None:
    serve(engine, policies, "a")
    serve(engine, policies, "b")  # the slot of a is not emptied; its values must not reach the base
    clients = [Engine(engine.url, KEY, model=name) for name in (MODEL, "b") * 3]
    engine._request("POST", "/pause", params={"mode": "keep"})
    with ThreadPoolExecutor(len(clients)) as pool:
        waiting = [pool.submit(client.probe, PROBE, f"mixed-{place}") for place, client in enumerate(clients)]
        engine._request("POST", "/resume")
        found = [each.result() for each in waiting]
    for place, logprobs in enumerate(found):
        assert logprobs == pytest.approx(policies["b" if place % 2 else "base"]["probe_logprobs"], abs=1e-4)


def test_an_adapter_that_was_replaced_is_not_served_any_more(
    engine: Engine, policies: dict[str, dict[str, Any]]
) -> None:
    old = serve(engine, policies, "a")
    serve(engine, policies, "b")
    with pytest.raises(EngineError, match="`a` does not exist"):
        old.probe(PROBE, "a")


def test_the_wrong_adapter_is_caught(engine: Engine, policies: dict[str, dict[str, Any]]) -> None:
    serve(engine, policies, "base")
    engine.serve("b", policies["a"]["directory"], ("base", policies["base"]["directory"]))
    with pytest.raises(EngineMismatch, match="does not serve policy b"):
        check_serving(Engine(engine.url, KEY, model="b"), policies["b"], ENGINE)
    with pytest.raises(EngineMismatch, match="does not serve policy a"):  # the base alone is no adapter
        check_serving(Engine(engine.url, KEY), policies["a"], ENGINE)


def test_what_cannot_be_loaded_leaves_an_engine_that_says_so(
    engine: Engine, policies: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}))
    with pytest.raises(EngineError, match="load_lora_adapter answered"):
        engine.serve("broken", broken, ("base", policies["base"]["directory"]))
    assert engine.served() is None
    assert check_serving(serve(engine, policies, "a"), policies["a"], ENGINE) < 1e-4


def test_the_arguments_name_the_linear_maps_of_the_layers(policies: dict[str, dict[str, Any]]) -> None:
    base = policies["base"]["directory"]
    maps = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert linear_maps(base) == maps
    sizes = ["--enable-lora", "--max-loras", "2", "--max-lora-rank"]
    assert arguments(LORA, base) == [*sizes, "8", "--lora-target-modules", *maps]
    named = LoraConfig(rank=9, target_modules=("q_proj",))
    assert arguments(named, base) == [*sizes, "16", "--lora-target-modules", "q_proj"]

"""Policies with experts reach a real engine from files and from the learner's memory, with checksum and log-probs."""

from contextlib import closing, nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file

from flows.services.base import Supervisor
from flows.services.engine import InferenceService
from flows.services.learner import LearnerProcess
from tasks.inference.engine.checks import EngineMismatch, check_serving, check_weights
from tasks.inference.engine.client import Engine
from tasks.inference.engine.transfer import State, WeightTransfer
from tasks.runtime.stage import Policy
from tests.fixtures.family_models import tiny_family
from tests.fixtures.hosts import ENGINE, engine_of, recorded_first, small_run
from tests.tasks.inference.engine.probes import policy_row

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.mark.essential
def test_policies_with_experts_are_served_from_files_and_from_memory(tmp_path, monkeypatch):
    """`serve` compares the checksum and the log-probs; three policies in turn, so that old experts would be seen."""
    models = {f"policy{seed}": tiny_family(tmp_path / f"model{seed}", "qwen3_moe", seed=seed) for seed in (3, 4, 5)}
    context, states, enter = small_run(tmp_path, models["policy3"], weight_transfer="gloo"), [], WeightTransfer.enter
    monkeypatch.setattr(WeightTransfer, "enter", lambda self, state: [enter(self, state), states.append(state)])
    with Supervisor("a", tmp_path / "logs") as supervisor:
        engine = InferenceService(supervisor, context, models["policy3"])
        engine.learner = learner = LearnerProcess(supervisor, context)
        engine.begin()
        policies = [Policy(key, 0) for key in models]
        for policy, model in zip(policies, models.values(), strict=True):
            recorded_first(context.store, "a", policy, learner.load_fresh(policy, model), model)
        # The learner holds the last one, which is sent; the engine reads the others.
        for policy in (policies[0], policies[2], policies[1]):
            engine.serve(policy)
            with closing(Engine(engine.handles[0].wait()["url"], engine.key)) as client:
                assert client.state().policy_key == policy.key
    assert states.count(State.PROVEN) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["glm4_moe", "olmoe", "mixtral", "gpt_oss"])
def test_a_family_is_served_after_reloads_and_an_expert_of_another_policy_is_caught(tmp_path, family):
    """vLLM 0.31 leaves sinks and experts of gpt_oss as they were; when it loads them, that fails here."""
    models = {seed: tiny_family(tmp_path / seed, family, seed=int(seed)) for seed in "12"}
    with engine_of(models["1"], tmp_path / "report.json") as engine:
        for seed in "121":
            row = policy_row(seed, models[seed])
            engine.serve(seed, models[seed])
            with (
                nullcontext() if family != "gpt_oss" or seed == "1" else pytest.raises(EngineMismatch, match="kept old")
            ):
                assert check_weights(engine, row, models[seed]) is True
                assert check_serving(engine, row, ENGINE) < 1e-3
        weights = load_file(models["1"] / "model.safetensors")
        name = next(name for name in weights if "experts" in name)
        weights[name] = torch.nextafter(weights[name], torch.ones(1))
        save_file(weights, models["1"] / "model.safetensors", {"format": "pt"})
        with pytest.raises(EngineMismatch, match="is not that of the policy"):
            check_weights(engine, row, models["1"])

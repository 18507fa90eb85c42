"""Adapters beside their base in this machine's engine: `stagecoach lora-smoke` runs this test over the user's model.

The learner scores two random adapters over the model and an engine serves them. The CPU build of vLLM mixes base and
adapter up in one batch unless it is patched.
"""

import json
import secrets
import subprocess
import sys

import pytest

from configs.training import LoraConfig
from tasks.inference.engine import model_info
from tasks.inference.engine.checks import tolerance
from tasks.runtime.process_variables import module_command
from tasks.training.policy import probe_token_ids
from tests.fixtures.adapter_probes import NEW_TOKENS, check_mixed_batch, check_swaps, measure_slowdown
from tests.fixtures.hosts import engine_of

pytestmark = [pytest.mark.engine, pytest.mark.essential]


@pytest.fixture
def model(config, tmp_path):
    if config.model.path:
        return model_info.model_directory(config.model.path)
    from tasks.learner.tiny import tiny_qwen3

    return tiny_qwen3(tmp_path / "model", seed=3, tied=True)


def test_the_engine_here_serves_adapters_beside_their_base(config, model, variables, tmp_path, check):
    training = config.training.model_copy(update={"lora": config.training.lora or LoraConfig(rank=3, alpha=6)})
    config = config.model_copy(update={"training": training})
    base, *adapters = scored_adapters(config, model, variables, tmp_path / "adapters")
    engines = [
        # With a key of its own: nobody else on a user's machine may use the engines.
        engine_of(
            model,
            tmp_path / f"{name}.json",
            config.engine,
            lora=lora,
            model=config.model,
            key=secrets.token_hex(16),
        )
        for name, lora in (("engine-with-adapters", training.lora), ("engine-without", None))
    ]
    with engines[0] as engine, engines[1] as plain:
        for result in (
            check_mixed_batch(engine, base, adapters, tolerance(config.engine)),
            check_swaps(engine, base, adapters, tolerance(config.engine)),
            measure_slowdown(engine, plain, base, adapters[0]),
        ):
            check(result.name, result.detail, "", result.passed)
        assert "times that for the base" in result.detail


def scored_adapters(config, model, variables, target):
    """Return rows of the base and of two random adapters with the learner's log-probs, made in a separate process."""
    # The engine's context needs room for the tokens that the probes sample.
    length = min(len(probe_token_ids(1)), config.engine.max_model_len - NEW_TOKENS)
    request = {
        "model": str(model),
        "target": str(target),
        "training": config.training.model_dump(mode="json"),
        "learner": config.learner.model_dump(mode="json"),
        "probe": probe_token_ids(model_info.read(model).vocab_size)[:length],
    }
    argv = module_command("tests.gpu.adapters", json.dumps(request))
    done = subprocess.run(argv, env=variables, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
    assert done.returncode == 0, f"no adapters could be made over {model}"
    rows = json.loads(done.stdout.splitlines()[-1])
    return rows

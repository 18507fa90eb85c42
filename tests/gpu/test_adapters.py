"""Adapters beside their base in this machine's engine: `stagecoach lora-smoke` runs this test over the user's model.

The learner scores two random adapters over the model and an engine serves them. The CPU build of vLLM mixes base and
adapter up in one batch unless it is patched.
"""

import json
import secrets
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from configs.run import RunConfig
from configs.training import LoraConfig
from flows.services.base import Supervisor
from flows.services.engine import NEEDS, is_healthy
from flows.services.process import ServiceSpec
from tasks.inference.engine import model_info
from tasks.inference.engine.checks import NEW_TOKENS, check_mixed_batch, check_swaps, measure_slowdown, tolerance
from tasks.inference.engine.client import Engine
from tasks.inference.engine.command import command
from tasks.runtime.process_variables import inherited_variables
from tasks.runtime.start_module import module_command
from tasks.training.policy import probe_token_ids

pytestmark = [pytest.mark.engine, pytest.mark.essential]


@pytest.fixture
def model(config: RunConfig, tmp_path: Path) -> Path:
    if config.model.path:
        return model_info.model_directory(config.model.path)
    from tasks.learner.tiny import tiny_qwen3

    return tiny_qwen3(tmp_path / "model", seed=3, tied=True)


def test_the_engine_here_serves_adapters_beside_their_base(
    config: RunConfig, model: Path, tmp_path: Path, check
) -> None:
    training = config.training.model_copy(update={"lora": config.training.lora or LoraConfig(rank=3, alpha=6)})
    config = config.model_copy(update={"training": training})
    base, *adapters = scored_adapters(config, model, tmp_path / "adapters")
    key = secrets.token_hex(16)  # other users of this machine have no access to the engines
    with Supervisor("lora-smoke", tmp_path) as supervisor:
        # Both start in parallel: the slowdown compares an engine with adapters with one that has none.
        specs = [engine_spec(config, model, supervisor.directory, key, lora) for lora in (training.lora, None)]
        urls = [handle.wait()["url"] for handle in [supervisor.start(spec) for spec in specs]]
        with closing(Engine(urls[0], key)) as engine, closing(Engine(urls[1], key)) as plain:
            for result in (
                check_mixed_batch(engine, base, adapters, tolerance(config.engine)),
                check_swaps(engine, base, adapters, tolerance(config.engine)),
                measure_slowdown(engine, plain, base, adapters[0]),
            ):
                check(result.name, result.detail, "", result.passed)


def scored_adapters(config: RunConfig, model: Path, target: Path) -> list[dict[str, Any]]:
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
    done = subprocess.run(argv, env=inherited_variables(), stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
    assert done.returncode == 0, f"no adapters could be made over {model}"
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def engine_spec(config: RunConfig, model: Path, directory: Path, key: str, lora: LoraConfig | None) -> ServiceSpec:
    name = "engine-with-adapters" if lora else "engine-without"
    report = directory / f"{name}.json"
    argv, environment = command(config.engine, config.model, model, report, lora)
    return ServiceSpec(
        name=name.replace("-", " "),
        argv=argv,
        env={**environment, config.engine.api_key_variable: key},
        report=report,
        log=directory / f"{name}.log",
        ready=lambda content: is_healthy(content["url"], key),
        startup_seconds=config.engine.startup_seconds,
        max_restarts=0,  # the results of a restarted engine would not describe the first
        needs=NEEDS,
    )

"""Tests whether the engine that is installed here can serve adapters beside their base, and at what cost.

Two random adapters over a model are scored by the learner, then served by an engine; nothing of it is kept. It is a
preflight: the CPU build of the engine, for one, mixes base and adapter up in one batch unless it is mended.
"""

import json
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from configs.checks.run import require_files
from configs.load import load
from configs.run import RunConfig
from configs.training import LoraConfig
from flows.cli.arguments import option, split_items
from flows.services.base import Supervisor
from flows.services.engine import NEEDS, is_healthy
from flows.services.process import ServiceSpec
from tasks.inference.engine import model_info
from tasks.inference.engine.checks import (
    NEW_TOKENS,
    ProbeResult,
    check_mixed_batch,
    check_swaps,
    measure_slowdown,
    tolerance,
)
from tasks.inference.engine.client import Engine
from tasks.inference.engine.command import command
from tasks.inference.engine.model_info import model_directory
from tasks.runtime.process_variables import inherited_variables
from tasks.runtime.start_module import module_command
from tasks.training.policy import probe_token_ids

SAMPLER = "tasks.learner.adapter_tools"
ROWS = "rows.json"


class SmokeFailed(ValueError):
    """The adapters to serve could not be made."""


def lora_smoke(
    *items: Annotated[str, option("FILES and OVERRIDES, model.path=DIR among them; see below", "[FILES] [OVERRIDES]")],
) -> int:
    """Print a line for each probe; return 1 if one failed, else 0. Without files the demo's settings apply."""
    files, overrides = split_items(items)
    config = load(files or ["demo"], overrides)
    training = config.training.model_copy(update={"lora": config.training.lora or LoraConfig()})
    passed = True
    for probed in probes(config.model_copy(update={"training": training})):
        print(f"{'PASS' if probed.passed else 'FAIL'}  {probed.name}: {probed.detail}", flush=True)
        passed &= probed.passed
    return 0 if passed else 1


def probes(config: RunConfig) -> Iterator[ProbeResult]:
    """Yield what each probe found, over the weights that `model.path` names.

    Raises ConfigError where it names none, SmokeFailed where the learner cannot make adapters of them, ServiceFailed
    where an engine does not start.
    """
    require_files(config)
    # With a key, so that nobody else on this machine can use the engines.
    model, key = model_directory(config.model.path), secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="stagecoach-adapters-") as directory:
        base, *adapters = _sample_adapters(config, model, Path(directory) / "adapters")
        with Supervisor("lora-smoke", Path(directory)) as supervisor:
            # Side by side, with adapters and without: what adapters cost is the difference of the two.
            specs = [_spec(config, model, supervisor.directory, key, lora) for lora in (config.training.lora, None)]
            handles = [supervisor.start(spec) for spec in specs]
            urls = [handle.wait()["url"] for handle in handles]
            with closing(Engine(urls[0], key)) as engine, closing(Engine(urls[1], key)) as plain:
                yield check_mixed_batch(engine, base, adapters, tolerance(config.engine))
                yield check_swaps(engine, base, adapters, tolerance(config.engine))
                yield measure_slowdown(engine, plain, base, adapters[0])


def _sample_adapters(config: RunConfig, model: Path, target: Path) -> list[dict[str, Any]]:
    """Have adapters made and scored in a process of its own: this one loads no torch."""
    # Room for the tokens that the probes sample must be left in the engine's context.
    length = min(len(probe_token_ids(1)), config.engine.max_model_len - NEW_TOKENS)
    request = {
        "model": str(model),
        "target": str(target),
        "training": config.training.model_dump(mode="json"),
        "learner": config.learner.model_dump(mode="json"),
        "probe": probe_token_ids(model_info.read(model).vocab_size)[:length],
    }
    argv, given = module_command(SAMPLER, "sample"), json.dumps(request)
    done = subprocess.run(argv, input=given, env=inherited_variables(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SmokeFailed(f"no adapters could be made over {model}: {done.stderr.strip()[-2000:]}\nNothing was kept")
    found: list[dict[str, Any]] = json.loads((target / ROWS).read_text())
    return found


def _spec(config: RunConfig, model: Path, directory: Path, key: str, lora: LoraConfig | None) -> ServiceSpec:
    name = "engine-with-adapters" if lora else "engine-without"
    report = directory / f"{name}.json"
    argv, environment = command(config.engine, config.model, model, report, lora)
    return ServiceSpec(
        name=name.replace("-", " "),
        argv=argv,
        env={**environment, config.engine.api_key_variable: key},
        report=report,
        log=directory / f"{name}.log",
        ready=lambda found: is_healthy(found["url"], key),
        startup_seconds=config.engine.startup_seconds,
        # A probe of an engine that was started twice would say nothing of the first.
        max_restarts=0,
        needs=NEEDS,
    )

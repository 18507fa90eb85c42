"""The commands gpu-smoke and lora-smoke: the acceptance tests of tests/gpu, run over the user's model and settings."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from flows.cli.arguments import Count, Json, UsageError, option, split_items

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests/gpu"
ON_A_GPU = ("training.device=cuda", "training.dtype=bfloat16", "training.policy_dtype=bfloat16")
"""Of the demo, whose learner trains in float32 on the processor, what runs of a GPU have."""


def gpu_smoke(
    *items: Annotated[str, option("model.path=DIR; see below", "[FILES] [OVERRIDES]")],
    tokens: Annotated[Count, option("tokens of the row that is trained")] = 4096,
    quick: Annotated[bool, option("leave out the kill of an engine that sleeps, to fit in eight minutes")] = False,
    as_json: Json = False,
) -> int:
    """Print a line for each check of the GPU; return 1 if one is wrong, else 0. Raises UsageError without a checkout.

    Without files the demo's settings apply, in the precision of the device.
    """
    from flows.services.gpus import smallest_gpu

    files, overrides = split_items(items)
    if not files:
        overrides = ["engine.dtype=auto", *(ON_A_GPU if smallest_gpu() else ()), *overrides]
    return _run_tests("test_machine", files, overrides, tokens=tokens, quick=quick, json=as_json)


def lora_smoke(
    *items: Annotated[str, option("FILES and OVERRIDES, model.path=DIR among them; see below", "[FILES] [OVERRIDES]")],
) -> int:
    """Print a line for each check of adapters; return 1 if one is wrong, else 0.

    Without files the demo's settings apply. Raises ConfigError without model.path, UsageError without a checkout.
    """
    from configs.checks.run import require_files
    from configs.load import load

    files, overrides = split_items(items)
    require_files(load(files or ["demo"], overrides))
    return _run_tests("test_adapters", files, overrides)


def _run_tests(name: str, files: Sequence[str], overrides: Sequence[str], **settings: int) -> int:
    """Run a file of tests and let it print its checks; pytest's own output is standard error."""
    test = TESTS / f"{name}.py"
    if not test.is_file() or find_spec("pytest") is None:
        raise UsageError(
            "this command runs tests of the project, which an installed package does not bring: clone the project, "
            "`make install`, and call it there"
        )
    from configs.load import load

    load(files or ["demo"], overrides)  # a mistake in the config is reported before anything starts
    report = os.dup(1)
    request = {"files": files or ["demo"], "overrides": overrides, "report": report, "json": False, **settings}
    # Tests are offline by default; a model of the hub may have to be downloaded here.
    variables = {"HF_HUB_OFFLINE": "0", **os.environ, "STAGECOACH_SMOKE": json.dumps(request)}
    argv = [sys.executable, "-m", "pytest", "-q", "--timeout=0", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    argv += ["-c", str(ROOT / "pyproject.toml"), str(test)]
    with tempfile.TemporaryDirectory(prefix="stagecoach-smoke-") as scratch:
        argv.append(f"--basetemp={scratch}/pytest")
        done = subprocess.run(argv, env=variables, pass_fds=[report], stdout=2, check=False)
    os.close(report)
    return 1 if done.returncode else 0

"""Environments from the pipeline's side: how to start their servers and read their examples, without importing them."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from storage.schemas import EXAMPLES

if TYPE_CHECKING:
    from configs.sections import EnvironmentConfig

EXAMPLES_SECONDS = 600.0
AGAIN_SECONDS = 5.0
HOST = "tasks.inference.environment_host"
OLDER = re.compile(r"^AttributeError: (taskset module .* defines no `__all__`|module 'verifiers' has no attribute)")
OLDER_HINT = (
    "A package with `load_environment` is of an interface that verifiers no longer has, and nothing bridges it: "
    "install a version of the package that exports a Taskset, or write one around its data and rewards (docs/traces.md)"
)


class EnvironmentUnavailable(ValueError):
    """An environment's package is not installed, or cannot be loaded as configured."""


def command(environment: "EnvironmentConfig", report: str | Path) -> tuple[list[str], dict[str, str]]:
    """Argument list and environment variables of the process that serves `environment`.

    The process writes `{"address": ...}` to `report` once it takes requests. Raises EnvironmentUnavailable where a
    package is missing.
    """
    package_version(environment)
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    variables |= {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), "PYTHONUNBUFFERED": "1"}
    return _argv(environment, Path(report)), variables


def answers(address: str, seconds: float = 2.0) -> bool:
    """Whether an environment server at `address` answers a health request."""
    from verifiers.v1.serve.client import EnvClient

    async def ask() -> bool:
        client = EnvClient(address)
        try:
            return await client.health(timeout=seconds)
        finally:
            await client.close()

    return asyncio.run(ask())


def hangs(address: str, seconds: float) -> bool:
    """Whether an environment server leaves a health request unanswered for so long, and a second one for a while.

    The second is for a caller that did not run itself meanwhile. A server answers between two steps of its event loop:
    it is asked whether that loop goes on, however slowly.
    """
    return not answers(address, seconds) and not answers(address, min(seconds, AGAIN_SECONDS))


def _argv(environment: "EnvironmentConfig", report: Path) -> list[str]:
    return [sys.executable, "-m", HOST, "--config", environment.model_dump_json(), "--report", str(report)]


def examples(environment: "EnvironmentConfig") -> pa.Table:
    """The environment's examples, with the schema of the examples table, read in a process of its own.

    Raises EnvironmentUnavailable where the taskset cannot be loaded or holds nothing.
    """
    package_version(environment)
    with tempfile.TemporaryDirectory(prefix="stagecoach-examples-") as directory:
        target, report = Path(directory, "examples.arrow"), Path(directory, "report.json")
        argv = [*_argv(environment, report), "--examples", str(target)]
        variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
        try:
            done = subprocess.run(
                argv, env=variables, capture_output=True, text=True, timeout=EXAMPLES_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise EnvironmentUnavailable(
                f"environment {environment.name!r}: its taskset did not yield {environment.max_examples} examples in "
                f"{EXAMPLES_SECONDS:.0f} s; lower max_examples"
            ) from error
        if done.returncode:
            raise EnvironmentUnavailable(_reason(environment, report, done.stderr))
        with pa.OSFile(str(target)) as source:
            table: pa.Table = pa.ipc.open_file(source).read_all()
    if not table.num_rows:
        raise EnvironmentUnavailable(f"environment {environment.name!r}: its taskset yields no examples")
    return table.cast(EXAMPLES.arrow)


def _reason(environment: "EnvironmentConfig", report: Path, log: str) -> str:
    """What to tell about an environment that could not be loaded, from its report or else the end of its log."""
    about = f"environment {environment.name!r} (taskset {environment.taskset.get('id')!r})"
    if not report.exists():
        return f"{about}: the process that reads its examples died:\n" + "\n".join(log.splitlines()[-15:])
    told: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    if told["missing"]:
        return f"{about} does not import: module {told['missing']!r} is missing. Install the package that has it"
    hint = f". {OLDER_HINT}" if OLDER.search(f"{told['error']}: {told['message']}") else ""
    return f"{about} cannot be loaded: {told['error']}: {told['message']}{hint}"


def package_version(environment: "EnvironmentConfig") -> str:
    """Names and versions of the packages whose code runs in the environment; nothing of theirs is imported.

    Raises EnvironmentUnavailable where one is not installed.
    """
    plugins = [("taskset", environment.taskset, "tasksets"), ("harness", environment.harness, "harnesses")]
    if environment.env.get("id"):
        plugins.append(("env", environment.env, "envs"))
    own = {f"seats.{name}.harness": seat.harness for name, seat in environment.seats.items()}
    own |= {f"env.{name}.harness": _harness(each) for name, each in environment.env.items()}
    plugins += [(kind, harness, "harnesses") for kind, harness in own.items() if harness]
    parts = [_distribution(environment, kind, str(plugin.get("id", "")), group) for kind, plugin, group in plugins]
    return ", ".join(dict.fromkeys([*parts, f"verifiers {version('verifiers')}"]))


def _harness(settings: Any) -> dict[str, Any]:
    """Return the harness that an environment's own settings name for a seat; empty where they name none."""
    harness = settings.get("harness") if isinstance(settings, dict) else None
    return harness if isinstance(harness, dict) and "id" in harness else {}


def _distribution(environment: "EnvironmentConfig", kind: str, plugin: str, group: str) -> str:
    """Name and version of the distribution that holds a plugin, found as verifiers finds it: its own, then any."""
    if not plugin:
        raise EnvironmentUnavailable(f"environment {environment.name!r}: {kind}.id is missing; it names a package")
    name = plugin.rsplit("/", 1)[-1].split("@", 1)[0]
    module = name.replace("-", "_").lower()
    verifiers = find_spec("verifiers")
    if verifiers and any(
        Path(root, "v1", group, module).exists() for root in verifiers.submodule_search_locations or ()
    ):
        return f"verifiers {version('verifiers')}"
    try:
        return f"{name.replace('_', '-')} {version(name)}"
    except PackageNotFoundError:
        distributions = packages_distributions().get(module)
    if distributions:
        return f"{distributions[0]} {version(distributions[0])}"
    if find_spec(module):
        return f"{module} (not a package)"
    raise EnvironmentUnavailable(
        f"environment {environment.name!r}: {kind} {plugin!r} is not installed: there is no module {module!r}. Install "
        f"the package that has it, for example `pip install {name.replace('_', '-')}`, or for one of the samples "
        f"`pip install ./environments/{module}`"
    )

"""Environments on the pipeline's side: commands, health and examples, without importing their packages."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from storage.policies.scratch import ScratchDirectories
from storage.schemas.stage_tables import EXAMPLES
from tasks.inference.environments.facts import EnvironmentFacts
from tasks.inference.environments.packages import EnvironmentUnavailable, require_same_code
from tasks.runtime.process_variables import inherited_variables, needed_by

if TYPE_CHECKING:
    from configs.environments import EnvironmentConfig

EXAMPLES_SECONDS = 600.0
RETRY_SECONDS = 5.0
"""Longest wait for an answer to the second health request."""
HOST = "tasks.inference.environments.host"
# Matches how verifiers fails on a package written for an interface that it had before.
OLD_INTERFACE = re.compile(
    r"^AttributeError: (taskset module .* defines no `__all__`|module 'verifiers(\.v1)?' has no attribute)"
    r"|^TypeError: Can't instantiate abstract class .*'load'"
)
OLD_INTERFACE_HINT = (
    "A package with `load_environment` or `load_tasks` is of an interface that verifiers no longer has, and nothing "
    "bridges it: install a version of the package that exports a Taskset with `load`, or write one around its data and "
    "rewards (docs/traces.md)"
)


def command(environment: "EnvironmentConfig", report: str | Path) -> tuple[list[str], dict[str, str]]:
    """Argument list and environment variables of the process that serves `environment`.

    The process writes `{"address": ...}` to `report` once it takes requests. Raises EnvironmentUnavailable where a
    package is missing, or was edited since the run began.
    """
    require_same_code(environment)
    return host_arguments(HOST, environment, report), host_variables()


def host_arguments(module: str, environment: "EnvironmentConfig", report: str | Path) -> list[str]:
    """Return the arguments of a process that imports the environment: its server, or its grader.

    Its section of the config lies beside the report, for our eyes only: others can read a command line.
    """
    config = Path(report).with_suffix(".config.json")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.unlink(missing_ok=True)  # it may be a link, or have been made for all to read
    descriptor = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(environment.model_dump_json())
    return [sys.executable, "-m", module, "--config", str(config), "--report", str(report)]


def host_variables() -> dict[str, str]:
    """Return the environment variables of such a process."""
    # One thread: many of these processes share the machine with the engine, which needs the cores.
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    return variables | {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), "PYTHONUNBUFFERED": "1"}


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
    """Whether an environment server leaves a health request unanswered for `seconds`, and then a second one.

    The second request is for a caller that was itself suspended meanwhile. A server answers between two steps of its
    event loop, so this checks that the loop goes on, however slowly. Where the request fails otherwise (no file
    descriptor left here, or an error as answer) nothing is known of its loop, and it does not hang.
    """
    import zmq

    try:
        return not answers(address, seconds) and not answers(address, min(seconds, RETRY_SECONDS))
    except (OSError, RuntimeError, zmq.ZMQError):
        logging.getLogger(__name__).warning("cannot tell whether the server at %s hangs", address, exc_info=True)
        return False


@dataclass(frozen=True)
class LoadedEnvironment:
    """An environment as its own process has loaded it."""

    examples: pa.Table
    """Rows of the examples table."""
    facts: EnvironmentFacts


def examples(environment: "EnvironmentConfig") -> pa.Table:
    """Return the environment's examples, with the schema of the examples table; raises what `load` raises."""
    return load(environment).examples


def load(environment: "EnvironmentConfig") -> LoadedEnvironment:
    """Return the environment's examples and facts, read in a separate process.

    Raises EnvironmentUnavailable where it cannot be loaded, holds nothing, or was edited since the run began.
    """
    require_same_code(environment)
    # A scratch directory is removed later, too, where this process is killed before it comes to that.
    scratches = ScratchDirectories(Path(tempfile.gettempdir()) / f"stagecoach-{os.getuid()}")
    directory = scratches.make("examples")
    try:
        return _load(environment, directory)
    finally:
        scratches.discard(directory)


def _load(environment: "EnvironmentConfig", directory: Path) -> LoadedEnvironment:
    target, report, log = (directory / name for name in ("examples.arrow", "report.json", "log"))
    try:
        argv = [*host_arguments(HOST, environment, report), "--examples", str(target)]
        status = _run(argv, inherited_variables(needed_by(environment)), log)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentUnavailable(
            f"environment {environment.name!r}: its taskset did not yield {environment.max_examples} examples in "
            f"{EXAMPLES_SECONDS:.0f} s; lower max_examples"
        ) from error
    if status:
        raise EnvironmentUnavailable(_reason(environment, report, log.read_text(encoding="utf-8", errors="replace")))
    table = read_rows(target)
    if not table.num_rows:
        raise EnvironmentUnavailable(f"environment {environment.name!r}: its taskset yields no examples")
    said = json.loads(report.read_text(encoding="utf-8"))["facts"]
    facts = EnvironmentFacts(said["seats"], said["scores"], tuple(said["settings"]))
    return LoadedEnvironment(table.cast(EXAMPLES.arrow), facts)


def _run(argv: list[str], variables: Mapping[str, str], log: Path) -> int:
    """Run a process to its end and return its exit status; kill what it left running in its session.

    Its output goes to a file and not to a pipe, which stays open as long as any child that inherited it lives.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, env={**variables, **host_variables()}, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(EXAMPLES_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _reason(environment: "EnvironmentConfig", report: Path, log: str) -> str:
    """Return why an environment could not be loaded, from the process's report or else the end of its log."""
    about = f"environment {environment.name!r} (taskset {environment.taskset.get('id')!r})"
    if not report.exists():
        return f"{about}: the process that reads its examples died:\n" + "\n".join(log.splitlines()[-15:])
    outcome: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    if outcome["missing"]:
        return f"{about} does not import: module {outcome['missing']!r} is missing. Install the package that has it"
    hint = f". {OLD_INTERFACE_HINT}" if OLD_INTERFACE.search(f"{outcome['error']}: {outcome['message']}") else ""
    return f"{about} cannot be loaded: {outcome['error']}: {outcome['message']}{hint}"


def write_rows(path: Path, rows: pa.Table) -> None:
    """Write rows as an Arrow file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)


def read_rows(path: Path) -> pa.Table:
    """Read the rows of an Arrow file, into memory of their own."""
    with pa.OSFile(str(path), "rb") as source:
        rows: pa.Table = pa.ipc.open_file(source).read_all()
    return rows

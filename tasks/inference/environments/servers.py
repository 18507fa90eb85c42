"""Environments on the pipeline's side: commands, health and examples, without importing their packages."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from storage.policies.scratch import ScratchDirectories
from storage.roots import user_directory
from storage.schemas.stage_tables import EXAMPLES
from tasks.inference.engine.host import write_private
from tasks.inference.environments.introspection import EnvironmentFacts
from tasks.inference.environments.packages import EnvironmentUnavailable, require_same_code
from tasks.inference.trace_rows.failures import add_advice
from tasks.runtime.process_variables import inherited_variables, module_command, needed_by

if TYPE_CHECKING:
    from configs.environments import EnvironmentConfig

EXAMPLES_SECONDS = 600.0
ROWS, REPORT, LOG = "examples.arrow", "report.json", "log"
"""Files of a process that loads an environment."""
RETRY_SECONDS = 5.0
"""Longest wait for an answer to the second health request."""
KEY_VARIABLE = "STAGECOACH_ENVIRONMENT_KEY"
"""The variable by which a server gets the key of its connections."""
# Matches how verifiers fails on a package written for an interface that it had before.
OLD_INTERFACE = re.compile(
    r"^AttributeError: (taskset module .* defines no `__all__`|module 'verifiers(\.v1)?' has no attribute)"
    r"|^TypeError: Can't instantiate abstract class .*'load'"
    r"|^ImportError: cannot import name '\w+' from 'verifiers'"
    r"|^TypeError: taskset module .* exports no Taskset subclass .*'load_(environment|tasks)'"
)
OLD_INTERFACE_HINT = (
    "A package with `load_environment` or `load_tasks` is of an interface that verifiers no longer has, and nothing "
    "bridges it: install a version of the package that exports a Taskset with `load`, or write one around its data and "
    "rewards (docs/traces.md)"
)


def command(environment: "EnvironmentConfig", report: str | Path, *options: str) -> tuple[list[str], dict[str, str]]:
    """Return argument list and environment variables of a process that imports `environment`.

    It is the environment's server; with the option `--grade` its grader, whose key the caller adds to the variables.
    The process writes `{"address": ...}` to `report` once it takes requests. Its section of the config lies beside the
    report, for this user alone: others can read a command line. Raises EnvironmentUnavailable where a package is
    missing, or was edited since the run began.
    """
    require_same_code(environment)
    config = Path(report).with_suffix(".config.json")
    write_private(config, environment.model_dump_json())
    host = "tasks.inference.environments.host"
    argv = module_command(host, "--config", str(config), "--report", str(report), *options)
    # One thread: many of these processes share the machine with the engine, which needs the cores.
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    # HF_HUB_OFFLINE stays as it is in the shell: most public environments load their data from the hub.
    return argv, variables | {"PYTHONUNBUFFERED": "1"}


def answers(address: str, seconds: float = 2.0) -> bool | None:
    """Whether an environment server answers a health request in time; None where nothing is known of it.

    That is where the request fails otherwise: no file descriptor is left here, or the answer is an error.
    """
    import zmq

    from tasks.inference.environments.connections import connect

    async def ask() -> bool:
        connection = connect(address)
        try:
            return bool(await connection.health(seconds))
        finally:
            await connection.close()

    try:
        return asyncio.run(ask())
    except (OSError, RuntimeError, zmq.ZMQError):
        logging.getLogger(__name__).warning("cannot tell whether the server at %s answers", address, exc_info=True)
        return None


def hangs(address: str, seconds: float) -> bool:
    """Whether an environment server leaves a health request unanswered for `seconds`, and then a second one.

    The second request is for a caller that was itself suspended meanwhile. A server answers between two steps of its
    event loop, so this checks that the loop goes on, however slowly. One of which nothing is known does not hang.
    """
    return answers(address, seconds) is False and answers(address, min(seconds, RETRY_SECONDS)) is False


@dataclass(frozen=True)
class LoadedEnvironment:
    """An environment as its own process has loaded it."""

    examples: pa.Table
    """Rows of the examples table."""
    facts: EnvironmentFacts
    long_prompts: tuple[int, ...] = ()
    """Tokens of the prompts for whose length examples are left out."""


def load_all(environments: "Sequence[EnvironmentConfig]") -> list[LoadedEnvironment]:
    """Return the examples and facts of environments, in their order.

    Each is loaded in a process of its own, as many at a time as there are cores. All are loaded even where one fails,
    so that one message names all that is to be mended.

    Raises EnvironmentUnavailable where one cannot be loaded, holds nothing, or was edited since the run began.
    """
    # Scratch directories are removed later, too, where this process is killed before it comes to that.
    temporary = user_directory(tempfile.gettempdir())
    scratches = ScratchDirectories(temporary, private=temporary)
    cores = len(os.sched_getaffinity(0))
    started = list[tuple["EnvironmentConfig", Path, "subprocess.Popen[bytes]"]]()
    loaded, problems = list[LoadedEnvironment](), list[EnvironmentUnavailable]()
    with ExitStack() as ended:

        def read_next() -> None:
            try:
                loaded.append(_read_examples(*started.pop(0)))
            except EnvironmentUnavailable as problem:
                problems.append(problem)

        for environment in environments:
            if len(started) == cores:
                read_next()
            directory = scratches.make("examples")
            ended.callback(scratches.discard, directory)
            try:
                process = _start(environment, directory)
            except EnvironmentUnavailable as problem:
                problems.append(problem)
                continue
            ended.callback(_kill_session, process)
            started.append((environment, directory, process))
        while started:
            read_next()
    if problems:
        raise EnvironmentUnavailable("\n".join(map(str, problems)))
    return loaded


def _start(environment: "EnvironmentConfig", directory: Path) -> "subprocess.Popen[bytes]":
    """Start a process that loads an environment and writes what it loads to `directory`."""
    argv, variables = command(environment, directory / REPORT, "--examples", str(directory / ROWS))
    variables = inherited_variables(needed_by(environment)) | variables
    # Output goes to a file and not to a pipe, which stays open as long as any child that inherited it lives.
    with (directory / LOG).open("wb") as output:
        return subprocess.Popen(argv, env=variables, stdout=output, stderr=output, start_new_session=True)


def _read_examples(
    environment: "EnvironmentConfig", directory: Path, process: "subprocess.Popen[bytes]"
) -> LoadedEnvironment:
    """Return what a process has loaded; waits for it."""
    report = directory / REPORT
    try:
        process.wait(EXAMPLES_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentUnavailable(
            f"environment {environment.name!r}: its taskset did not yield {environment.max_examples} "
            f"examples in {EXAMPLES_SECONDS:.0f} s; lower max_examples"
        ) from error
    # What is reported is whole, however the process ended after it; and none that ended well may have no report.
    reported = json.loads(report.read_text("utf-8")) if report.exists() else {}
    if "facts" not in reported:
        raise EnvironmentUnavailable(_reason(environment, reported, (directory / LOG).read_text("utf-8", "replace")))
    rows = read_rows(directory / ROWS)
    if not rows.num_rows:
        raise EnvironmentUnavailable(f"environment {environment.name!r}: its taskset yields no examples")
    return LoadedEnvironment(rows.cast(EXAMPLES.arrow), EnvironmentFacts(**reported["facts"]))


def _kill_session(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all others in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(environment: "EnvironmentConfig", outcome: Mapping[str, Any], log: str) -> str:
    """Return why an environment could not be loaded, from what its process reported or else the end of its log."""
    about = f"environment {environment.name!r} (taskset {environment.taskset.get('id')!r})"
    if not outcome:
        last = "\n".join(log.splitlines()[-15:])
        return f"{about}: the process that reads its examples ended without a word:\n{last}"
    missing = outcome["missing"]
    if missing and not missing.startswith("verifiers."):
        return f"{about} does not import: module {missing!r} is missing. Install the package that has it"
    why = f"{outcome['error']}: {add_advice(outcome['message'])}"
    if missing:
        why = f"module {missing!r} is missing, which this verifiers does not have"
    is_old = missing or OLD_INTERFACE.search(f"{outcome['error']}: {outcome['message']}")
    hint = f". {OLD_INTERFACE_HINT}" if is_old else ""
    return f"{about} cannot be loaded: {why}{hint}"


def write_rows(path: Path, rows: pa.Table) -> None:
    """Write rows as an Arrow file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)


def read_rows(path: Path) -> pa.Table:
    """Read the rows of an Arrow file, into memory of their own."""
    with pa.OSFile(str(path), "rb") as source:
        rows: pa.Table = pa.ipc.open_file(source).read_all()
    return rows

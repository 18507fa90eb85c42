"""Regrading on the pipeline's side: the command of a grader's process, the digest of its code, and its client."""

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tasks.inference.environments.servers import (
    EnvironmentUnavailable,
    host_arguments,
    host_variables,
    package_version,
    read_rows,
    write_rows,
)

if TYPE_CHECKING:
    from configs.environments import EnvironmentConfig


HOST = "tasks.inference.grading.host"
KEY_VARIABLE = "STAGECOACH_GRADER_KEY"
STALL_SECONDS = 900.0
"""Longest wait for the next scored episode: no time limit can stop a reward function that never awaits."""

SCORES = pa.schema(
    [
        pa.field("trace_id", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),
        *(pa.field(name, pa.string(), nullable=False) for name in ("rewards", "metrics", "info")),
        *(pa.field(f"error_{name}", pa.string()) for name in ("class", "type", "message", "traceback")),
        pa.field("seconds", pa.float64(), nullable=False),
    ]
)
"""A grader's answer: a row for each trace without an error; columns as in traces, and seconds of scoring."""


class NotRegradable(ValueError):
    """An environment's scores need what was not recorded: a judge's model, a runtime, the rollout's state."""


class GraderStalled(ValueError):
    """A grader lives and makes no progress."""


class GraderLost(Exception):
    """The grader's process or connection is gone; another grader can answer the same request."""


def command(environment: "EnvironmentConfig", report: str | Path) -> tuple[list[str], dict[str, str]]:
    """Return the argument list and environment of a grader's process for `environment`; the caller adds the key.

    The process writes `{"address": ...}` to `report` once it takes requests. Raises EnvironmentUnavailable where a
    package is missing.
    """
    package_version(environment)
    return host_arguments(HOST, environment, report), host_variables()


def answers(address: str, key: str) -> bool:
    """Tell whether a grader at `address` answers."""
    with _connect(address, key) as grader:
        return "ready" in _ask(grader, {"ready": True}, 5.0)


def scores(address: str, key: str, tables: Mapping[str, pa.Table]) -> pa.Table:
    """Let a grader score the traces of one environment; return a table of SCORES, in the order of the traces.

    `tables` are examples, traces and messages, by name, all traces of an episode among them. Raises NotRegradable,
    GraderStalled, or GraderLost where the process went away.
    """
    with tempfile.TemporaryDirectory(prefix="stagecoach-regrade-") as directory:
        for name, rows in tables.items():
            write_rows(Path(directory, f"{name}.arrow"), rows)
        with _connect(address, key) as grader:
            answer = _ask(grader, {"directory": directory}, STALL_SECONDS)
        if "refused" in answer:
            raise NotRegradable(answer["refused"])
        return read_rows(Path(directory, "scores.arrow"))


def _connect(address: str, key: str) -> Connection:
    host, _, port = address.rpartition(":")
    try:
        return Client((host, int(port)), authkey=key.encode())
    except (OSError, EOFError, AuthenticationError) as error:
        raise GraderLost(f"no grader answers at {address}: {type(error).__name__}: {error}") from error


def _ask(grader: Connection, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the answer to a request; messages before it only report progress."""
    try:
        grader.send_bytes(json.dumps(request).encode())
        while grader.poll(seconds):  # the wait begins anew with every episode that is reported
            answer: dict[str, Any] = json.loads(grader.recv_bytes())
            if "working" not in answer:
                return answer
    except (OSError, EOFError) as error:
        raise GraderLost(f"a grader went away while it worked: {type(error).__name__}: {error}") from error
    raise GraderStalled(
        f"a grader finished no episode in {seconds:.0f} s: a reward function does not return. Nothing of it is in the "
        "store, what was recorded is as it was. Look at the environment's reward functions, then run the same again."
    )


def source_digest(environment: "EnvironmentConfig") -> str:
    """SHA-256 over the files of every package that an environment's section names, and the version of verifiers.

    These are the packages of the taskset, the harness, and the functions plugged into the task by import path. Plug-ins
    that come with verifiers, or are not installed, add nothing. Raises EnvironmentUnavailable for a missing file.
    """
    digest = hashlib.sha256(f"verifiers {version('verifiers')}".encode())
    for name in dict.fromkeys(_scoring_modules(environment)):
        for file, inside in _module_files(name):
            digest.update(f"\0{name}\0{inside}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _scoring_modules(environment: "EnvironmentConfig") -> Iterator[str]:
    """Yield the top-level modules, or the paths of files, whose code may take part in scoring."""
    for plugin in (environment.taskset, environment.harness):
        # An id may hold owner and version, owner/name@version; the module has the name alone.
        yield str(plugin["id"]).rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    task = environment.taskset.get("task") or {}
    for kind in ("rewards", "metrics"):
        for plugged in (task.get(kind) or {}).values():
            if path := plugged.get("fn"):
                file = path.rpartition(":")[0]
                if not file.endswith(".py"):
                    yield path.replace(":", ".").partition(".")[0]
                elif Path(file).is_file():
                    yield file
                else:
                    raise EnvironmentUnavailable(
                        f"environment {environment.name!r}: a function is plugged in from {file!r}, which is no file "
                        "here"
                    )


def _module_files(module: str) -> Iterator[tuple[Path, str]]:
    """Yield the files of a module with their names inside it, in order."""
    if module.endswith(".py"):
        yield Path(module), Path(module).name
        return
    spec = find_spec(module)
    if spec is None:
        return
    if not spec.submodule_search_locations:
        yield Path(spec.origin or ""), Path(spec.origin or "").name
        return
    for root in sorted(spec.submodule_search_locations):
        for file in sorted(Path(root).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file, file.relative_to(root).as_posix()

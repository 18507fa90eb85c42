"""Regrading from the pipeline's side: how to start a grader, and to have recorded traces scored by it.

A grader is a process that has loaded one environment and scores finished traces with its reward functions: no model, no
engine, no environment server. This side imports neither verifiers nor the environment's package.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tasks.inference.environments import package_version

if TYPE_CHECKING:
    from configs.sections import EnvironmentConfig

HOST = "tasks.inference.regrading_host"
KEY_VARIABLE = "STAGECOACH_GRADER_KEY"
STALL_SECONDS = 900.0
"""Longest wait for the next scored episode: a reward function that never gives up the processor cannot be stopped."""

_TEXT = pa.string()
_COLUMNS: "list[pa.Field[Any]]" = [
    pa.field("trace_id", _TEXT, nullable=False),
    pa.field("reward", pa.float64()),
    *(pa.field(name, _TEXT, nullable=False) for name in ("rewards", "metrics", "info")),
    *(pa.field(f"error_{name}", _TEXT) for name in ("class", "type", "message", "traceback")),
    pa.field("seconds", pa.float64(), nullable=False),
]
SCORES = pa.schema(_COLUMNS)
"""What a grader answers: a row for each trace that was not errored; columns as in traces, and seconds of scoring."""


class NotRegradable(ValueError):
    """An environment's scores need what was not recorded: a judge's model, a runtime, the rollout's state."""


class GraderStalled(ValueError):
    """A grader lives and does not get on."""


class GraderLost(Exception):
    """The grader's process is gone, or its connection is; what it was asked can be asked of another."""


def command(environment: "EnvironmentConfig", report: str | Path) -> tuple[list[str], dict[str, str]]:
    """Argument list and environment variables of the process that grades for `environment`; a key is to be added.

    The process writes `{"address": ...}` to `report` once it takes requests. Raises EnvironmentUnavailable where a
    package is missing.
    """
    package_version(environment)
    argv = [sys.executable, "-m", HOST, "--config", environment.model_dump_json(), "--report", str(report)]
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    variables |= {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), "PYTHONUNBUFFERED": "1"}
    return argv, variables


def answers(address: str, key: str) -> bool:
    """Whether a grader at `address` answers."""
    with _connected(address, key) as grader:
        return "ready" in _ask(grader, {"ready": True}, 5.0)


def scores(address: str, key: str, tables: Mapping[str, pa.Table]) -> pa.Table:
    """Have the traces of one environment scored; return a table of SCORES, in the order of the traces.

    `tables` are examples, traces and messages, by name, all traces of an episode among them. Raises NotRegradable,
    GraderStalled, or GraderLost where the process went away.
    """
    with tempfile.TemporaryDirectory(prefix="stagecoach-regrade-") as directory:
        for name, rows in tables.items():
            write_rows(Path(directory, f"{name}.arrow"), rows)
        with _connected(address, key) as grader:
            answer = _ask(grader, {"directory": directory}, STALL_SECONDS)
        if "refused" in answer:
            raise NotRegradable(answer["refused"])
        return read_rows(Path(directory, "scores.arrow"))


def write_rows(path: Path, rows: pa.Table) -> None:
    """Write rows as an Arrow file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)


def read_rows(path: Path) -> pa.Table:
    """Read the rows of an Arrow file, into memory of their own."""
    with pa.OSFile(str(path), "rb") as source:
        rows: pa.Table = pa.ipc.open_file(source).read_all()
    return rows


def _connected(address: str, key: str) -> Connection:
    host, _, port = address.rpartition(":")
    try:
        return Client((host, int(port)), authkey=key.encode())
    except (OSError, EOFError, AuthenticationError) as error:
        raise GraderLost(f"no grader answers at {address}: {type(error).__name__}: {error}") from error


def _ask(grader: Connection, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the answer to a request; what comes before it only says that work goes on."""
    try:
        grader.send_bytes(json.dumps(request).encode())
        while grader.poll(seconds):
            answer: dict[str, Any] = json.loads(grader.recv_bytes())
            if "working" not in answer:
                return answer
    except (OSError, EOFError) as error:
        raise GraderLost(f"a grader went away while it worked: {type(error).__name__}: {error}") from error
    raise GraderStalled(
        f"a grader finished no episode in {seconds:.0f} s: a reward function does not return. Nothing of it is in the "
        "store, what was recorded is as it was. Look at the environment's reward functions, then run the same again."
    )

"""The client of a grader: traces of one environment to their scores."""

import json
import tempfile
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage.schemas.stage_tables import TRACES
from tasks.inference.environments.servers import read_rows, write_rows
from tasks.inference.trace_rows.rows import error_columns

KEY_VARIABLE = "STAGECOACH_GRADER_KEY"
STALL_SECONDS = 900.0
"""Longest wait for the next scored episode: no time limit can stop a reward function that never awaits."""

COLUMNS = ("trace_id", "reward", "rewards", "metrics", "info", *error_columns(None))
SCORES = pa.schema([*map(TRACES.arrow.field, COLUMNS), pa.field("seconds", pa.float64(), nullable=False)])
"""A grader's answer: a row for each trace without an error; columns as in traces, and seconds of scoring."""


class GraderStalled(ValueError):
    """A grader lives and makes no progress."""


class GraderLost(Exception):
    """The grader's process or connection is gone; another grader can answer the same request."""


def answers(address: str, key: str) -> bool:
    """Tell whether a grader at `address` answers."""
    _connect(address, key).close()
    return True


def scores(address: str, key: str, tables: Mapping[str, pa.Table], losses: int = 0) -> pa.Table:
    """Let a grader score the traces of one environment; return a table of SCORES, in the order of the traces.

    `tables` are examples, traces and messages, by name, all traces of a group among them; `losses` is how many graders
    were lost by them before. Raises GraderStalled, or GraderLost where the process went away.
    """
    with tempfile.TemporaryDirectory(prefix="stagecoach-regrade-") as directory:
        for name, rows in tables.items():
            write_rows(Path(directory, f"{name}.arrow"), rows)
        with _connect(address, key) as grader:
            _ask(grader, {"directory": directory, "losses": losses})
        return read_rows(Path(directory, "scores.arrow"))


def _connect(address: str, key: str) -> Connection:
    host, _, port = address.rpartition(":")
    try:
        return Client((host, int(port)), authkey=key.encode())
    except (OSError, EOFError, AuthenticationError) as error:
        raise GraderLost(f"no grader answers at {address}: {type(error).__name__}: {error}") from error


def _ask(grader: Connection, request: Mapping[str, Any]) -> None:
    """Return once a request is answered; messages before that only report progress."""
    try:
        grader.send_bytes(json.dumps(request).encode())
        while grader.poll(STALL_SECONDS):  # the wait begins anew with every episode that is reported
            if "working" not in json.loads(grader.recv_bytes()):
                return
    except (OSError, EOFError) as error:
        raise GraderLost(f"a grader went away while it worked: {type(error).__name__}: {error}") from error
    raise GraderStalled(
        f"a grader finished no episode in {STALL_SECONDS:.0f} s: a reward function does not return. Nothing of it is "
        "in the store, what was recorded is as it was. Look at the environment's reward functions, then run the same "
        "again."
    )

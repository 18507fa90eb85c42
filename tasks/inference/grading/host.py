"""The process that grades for one environment: `python -m tasks.inference.grading.host --config JSON --report PATH`.

It loads the environment, binds a free loopback port and writes `{"address": ...}` to the report file. A client connects
with the key of STAGECOACH_GRADER_KEY and names a directory with examples, traces and messages as Arrow files; their
scores are written beside them. Graders are processes of their own because they import the environment's package.
"""

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import pyarrow as pa

from tasks.inference.engine.host import write_report
from tasks.inference.environments.host import load_verifiers, missing_module, set_up_process
from tasks.inference.grading.client import KEY_VARIABLE, SCORES, NotRegradable, read_rows, write_rows
from tasks.inference.grading.scores import Grader

ROWS = ("examples", "traces", "messages")


def serve(listener: Listener, grader: Grader) -> None:
    """Serve one connection after the other until SIGTERM."""
    while True:
        try:
            with listener.accept() as connection:
                _answer_requests(connection, grader)
        except (AuthenticationError, EOFError, OSError) as error:  # of this connection alone
            logging.info("a connection ended: %s: %s", type(error).__name__, error)


def _answer_requests(connection: Connection, grader: Grader) -> None:
    while True:
        request = json.loads(connection.recv_bytes())
        if "directory" not in request:
            _send(connection, ready=True)
            continue
        try:
            num_traces = _score_directory(Path(request["directory"]), connection, grader)
            _send(connection, scored=num_traces)
        except NotRegradable as refusal:
            _send(connection, refused=str(refusal))


def _score_directory(directory: Path, connection: Connection, grader: Grader) -> int:
    examples, traces, messages = (read_rows(directory / f"{name}.arrow").to_pylist() for name in ROWS)
    rows = asyncio.run(grader.score(examples, traces, messages, lambda: _send(connection, working=True)))
    write_rows(directory / "scores.arrow", pa.Table.from_pylist(rows, schema=SCORES))
    return len(rows)


def _send(connection: Connection, **answer: object) -> None:
    connection.send_bytes(json.dumps(answer).encode())


def main(argv: Sequence[str]) -> int:
    """Grade until SIGTERM; return 3 where the environment cannot be loaded."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, help="the environment's section of the config, as JSON")
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args(argv)
    set_up_process()
    environment = json.loads(arguments.config)
    try:
        load_verifiers()
        grader = Grader(environment)
    except Exception as error:
        # The boundary of this process: the parent reads the reason in the report or at the end of the log.
        logging.exception("environment %s cannot be loaded", environment["name"])
        report = {"error": type(error).__name__, "message": str(error), "missing": missing_module(error)}
        write_report(arguments.report, report)
        return 3
    # Removed from the environment variables: programs that reward functions start must not have the key.
    with Listener(("127.0.0.1", 0), authkey=os.environ.pop(KEY_VARIABLE).encode()) as listener:
        host, port = listener.address
        write_report(arguments.report, {"address": f"{host}:{port}", "pid": os.getpid()})
        serve(listener, grader)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

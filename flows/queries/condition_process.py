"""true_rows: evaluates a condition on rollouts in a child process with limits of memory and time.

A link may hold any condition, and an expression may make values of any size, so no process with other work evaluates
it. `matching_rows` calls `true_rows` in any thread. The rows reach the child as Arrow in shared memory. The child is
killed at its limits and when the reader goes away, and it ends with its parent.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from threading import Event

import pyarrow as pa

from flows.services.guardian import PR_SET_PDEATHSIG, prctl
from storage.read.query_limits import SANDBOX, Bounds, bounded_memory
from tasks.runtime.process_variables import module_command

LIMITS = Bounds(memory_gib=0.5, seconds=60)
NICENESS = 5
"""Added to the parent's: pages that evaluate no condition come first."""
POLL_SECONDS = 0.1
TABLES = ("rollouts", "traces")
"""Names of the rows in a query within the condition."""
OUT_OF_MEMORY = "out of memory"
INDEX = "index of the row"
"""The column of the rows that `true_rows` returns."""


class ConditionEnded(Exception):
    """The process of a condition ended without an answer; the text says why."""


class ConditionFailed(Exception):
    """DuckDB refuses the condition or fails on a value; the text is DuckDB's."""


def true_rows(rows: pa.Table, sql: str, reader_gone: Event | None = None, limits: Bounds = LIMITS) -> list[int]:
    """Return the values of column INDEX, in ascending order, where `sql`, an expression in DuckDB's SQL, is true.

    Raises ConditionEnded at a limit or once `reader_gone` is set, and ConditionFailed with DuckDB's message.
    """
    with os.fdopen(os.memfd_create("rollouts"), "wb") as file:
        with pa.ipc.new_file(file, rows.schema) as writer:
            writer.write_table(rows)
        file.flush()
        argv = module_command("flows.queries.condition_process", str(file.fileno()), repr(limits.memory_gib))
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=[file.fileno()]) as process:
            try:
                output, errors = _wait(process, sql, reader_gone, limits.seconds)
            finally:
                process.kill()
    try:
        answer = json.loads(output)
    except ValueError:  # the system ends a process at its limit of memory in several ways
        last_line = (errors.decode(errors="replace").splitlines() or [""])[-1]
        answer = {"ended": f"its process ended with status {process.returncode} {last_line}".strip()}
    if answer.get("ended") == OUT_OF_MEMORY:
        raise ConditionEnded(f"needs more than {limits.memory_gib:g} GiB of memory")
    if "ended" in answer:
        raise ConditionEnded(answer["ended"])
    if "error" in answer:
        raise ConditionFailed(answer["error"])
    indices: list[int] = answer["indices"]
    return indices


def _wait(
    process: "subprocess.Popen[bytes]", sql: str, reader_gone: Event | None, seconds: float
) -> tuple[bytes, bytes]:
    end, request = time.monotonic() + seconds, sql.encode()
    while True:
        try:
            return process.communicate(request, timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            request = b""
        if reader_gone is not None and reader_gone.is_set():
            raise ConditionEnded("was ended, because its reader went away")
        if time.monotonic() > end:
            raise ConditionEnded(f"takes longer than {seconds:g} s")


def main() -> None:
    """Evaluate the condition of stdin on the rows of a file descriptor, and print a JSON object of the result."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the thread that started this process waits for it
    os.nice(NICENESS)
    descriptor, memory_gib = sys.argv[1:]
    limits = Bounds(memory_gib=float(memory_gib))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with pa.memory_map(f"/proc/self/fd/{descriptor}") as file:
        rows = pa.ipc.open_file(file).read_all()
        print(json.dumps(_evaluate(rows, sys.stdin.buffer.read().decode(), limits)))


def _evaluate(rows: pa.Table, sql: str, limits: Bounds) -> dict[str, object]:
    import duckdb

    # The newline ends a comment at the end of the condition.
    query = f'select "{INDEX}" from {TABLES[0]} where (\n{sql}\n) order by 1'
    # One thread: the number of processes is the share of the processor that searches take.
    connection = duckdb.connect(config={**SANDBOX, "memory_limit": f"{limits.memory}B", "threads": "1"})
    with connection, bounded_memory(limits):
        for name in TABLES:
            connection.register(name, rows)
        try:
            return {"indices": [row[0] for row in connection.execute(query).fetchall()]}
        except (duckdb.OutOfMemoryException, MemoryError):
            return {"ended": OUT_OF_MEMORY}
        except duckdb.Error as error:
            return {"error": str(error).splitlines()[0]}


if __name__ == "__main__":
    main()

"""true_rows: evaluates a condition on rollouts in a child process with limits of memory and time.

A link may hold any condition, and an expression may make values of any size, so no process with other work evaluates
it. `matching_rows` calls `true_rows` in any thread. The rows reach the child as Arrow in shared memory; they are all
that it can read. The child is killed at its limits and when the reader goes away, and it ends with its parent.
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
TABLE = "rollouts"
"""Name of the rows in a query within the condition."""
INDEX = "index of the row"
"""The column of the rows that `true_rows` returns."""


class ConditionFailed(Exception):
    """A condition has no answer; the text says why."""


def true_rows(rows: pa.Table, sql: str, reader_gone: Event | None = None, limits: Bounds = LIMITS) -> list[int]:
    """Return the values of column INDEX, in ascending order, where `sql`, an expression in DuckDB's SQL, is true.

    Raises ConditionFailed with DuckDB's message, at a limit, or once `reader_gone` is set.
    """
    with os.fdopen(os.memfd_create(TABLE), "wb") as file:
        with pa.ipc.new_file(file, rows.schema) as writer:
            writer.write_table(rows)
        file.flush()
        argv = module_command("flows.queries.condition_process", str(file.fileno()), repr(limits.memory_gib))
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=[file.fileno()]) as process:
            try:
                output, errors = _wait(process, sql.encode(errors="replace"), reader_gone, limits.seconds)
            finally:
                process.kill()
    try:
        answer: list[int] | str = json.loads(output)
    except ValueError:  # the system ends a process at its limit of memory in several ways
        last_line = (errors.decode(errors="replace").splitlines() or [""])[-1]
        answer = f"was ended: its process has the exit status {process.returncode} {last_line}".strip()
    if isinstance(answer, str):
        raise ConditionFailed(answer)
    return answer


def _wait(
    process: "subprocess.Popen[bytes]", request: bytes, reader_gone: Event | None, seconds: float
) -> tuple[bytes, bytes]:
    end = time.monotonic() + seconds
    while True:
        try:
            return process.communicate(request, timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            request = b""
        if reader_gone is not None and reader_gone.is_set():
            raise ConditionFailed("was ended, because its reader went away")
        if time.monotonic() > end:
            raise ConditionFailed(f"takes longer than {seconds:g} s")


def main() -> None:
    """Evaluate the condition of stdin on the rows of a file descriptor; print indices, or a message, as JSON."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the thread that started this process waits for it
    os.nice(NICENESS)
    descriptor, memory_gib = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with pa.memory_map(f"/proc/self/fd/{descriptor}") as file:
        rows = pa.ipc.open_file(file).read_all()
        print(json.dumps(_evaluate(rows, sys.stdin.buffer.read().decode(), Bounds(memory_gib=float(memory_gib)))))


def _evaluate(rows: pa.Table, sql: str, limits: Bounds) -> list[int] | str:
    import duckdb

    # One thread: the number of processes is the share of the processor that searches take.
    connection = duckdb.connect(config={**SANDBOX, "memory_limit": f"{limits.memory}B", "threads": "1"})
    with connection, bounded_memory(limits):
        connection.register(TABLE, rows)
        try:
            duckdb.SQLExpression(sql)  # refuses clauses and further statements
            # The newline ends a comment at the end of the condition.
            found = connection.table(TABLE).filter(f"(\n{sql}\n)").select(f'"{INDEX}"').fetchall()
        except (duckdb.OutOfMemoryException, MemoryError):
            return f"needs more than {limits.memory_gib:g} GiB of memory"
        except duckdb.Error as error:
            return f"fails: {str(error).splitlines()[0]}"
    return sorted(index for (index,) in found)


if __name__ == "__main__":
    main()

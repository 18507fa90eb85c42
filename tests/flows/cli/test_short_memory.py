"""Where memory is short, a command says that, and neither aborts nor calls a file damaged."""

import resource
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.cli import explanation
from storage.delta.parquet import decode
from tests.fixtures.faults import happened

LIMIT = 1_500_000 * 1024


@pytest.mark.fault("processes", "an address space of 1.5 GB", "a message, no abort")
@pytest.mark.parametrize("command", [["runs"], ["show", "latest"], ["repair"], ["sql", "select 1"]])
def test_a_command_says_which_limit_is_too_small(tmp_path, command):
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *command, "--store", str(tmp_path / "store")],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT)),
    )
    happened(f"a limit of {LIMIT} bytes")
    assert done.returncode == 2 and "is 1.4 GiB (ulimit -v)" in done.stderr and "at least 3 GiB" in done.stderr


def test_a_file_that_is_read_when_memory_is_short_is_not_damaged(tmp_path, monkeypatch):
    rows = pa.table({"step": [1]})
    pq.write_table(rows, tmp_path / "rows.parquet")

    def no_memory(*_, **__):
        raise pa.ArrowMemoryError("malloc of size 256 failed")

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", no_memory)
    with pytest.raises(MemoryError) as short:
        decode(pa.OSFile(str(tmp_path / "rows.parquet")), rows.schema, "rows.parquet")
    message = explanation(short.value) or ""
    assert message.startswith("memory or threads are short: malloc of size 256 failed") and "ulimit" in message


def test_threads_that_cannot_be_started_are_explained():
    assert "ulimit" in (explanation(RuntimeError("can't start new thread")) or "")
    assert explanation(RuntimeError("anything else")) is None

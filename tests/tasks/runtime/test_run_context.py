"""A place reads what work made, also work that another process finished a moment ago."""

from pathlib import Path

import pytest

from configs.run import RunConfig
from storage.store import open_store
from tasks.runtime import run_context as contexts
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import ref_of
from tests.fixtures.rows import entry, messages


def test_rows_that_another_process_has_just_finished_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "LEDGER_SECONDS", 3600.0)
    here, there = (RunContext(open_store(tmp_path), "run", RunConfig(name="run"), {}) for _ in range(2))
    assert here.find("k") is None
    made = there.append("messages", messages(3), step=0, key="k", attempt="a")
    ref = ref_of(there.commit(entry("k", run="run", outputs=(made,))), computed=True)
    assert here.table("messages", [ref]).num_rows == 3

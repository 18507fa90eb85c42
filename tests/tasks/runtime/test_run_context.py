"""What a run works with: tables read lately, and work that another process finished a moment ago."""

from cachetools import LRUCache

from configs.run import RunConfig
from storage.refs import Slice
from storage.store import Store, open_store
from tasks.runtime import run_context as contexts
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import ref_of
from tests.fixtures.rows import append, entry, messages


def test_rows_are_read_from_the_store_once(tmp_path, monkeypatch):
    made = [append(open_store(tmp_path), number, 9, attempt=f"a{number}") for number in (2, 3)]
    context, read, size = RunContext(open_store(tmp_path), "run", RunConfig(name="run"), {}), [], 0
    store_read = Store.read

    def note(store, slices, columns=None):
        read.extend(piece.attempt for piece in slices)
        return store_read(store, slices, columns)

    monkeypatch.setattr(Store, "read", note)
    for room, expected in ((2.5, ["a2", "a3"]), (0.5, ["a2", "a3"] * 2)):
        size = store_read(context.store, made[1:]).nbytes
        monkeypatch.setattr(contexts, "_RECENT", LRUCache(room * size, getsizeof=lambda rows: rows.nbytes))
        read.clear()
        for piece in made * 2:
            assert context.read(piece, ["message"])["message"].to_pylist() == list(range(piece.rows))
        assert read == expected, "rows larger than the room for them are given out and not kept"


def test_of_small_tables_some_thousand_are_kept(monkeypatch):
    """A table of four rows takes some 20 kB beside its values, which the bound on values would not see."""
    recent = LRUCache(contexts._RECENT.maxsize, getsizeof=contexts._RECENT.getsizeof)
    monkeypatch.setattr(contexts, "_RECENT", recent)
    rows = messages(4)
    for number in range(3000):
        contexts.keep_recent(Slice("messages", "run", "a", 4, str(number), ()), rows)
    assert len(recent) == 1024 and ("messages", "2999") in recent


def test_rows_that_another_process_has_just_finished_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(contexts, "LEDGER_SECONDS", 3600.0)
    here, there = (RunContext(open_store(tmp_path), "run", RunConfig(name="run"), {}) for _ in range(2))
    assert here.find("k") is None
    made = there.append("messages", messages(3), step=0, key="k", attempt="a")
    ref = ref_of(there.commit(entry("k", run="run", outputs=(made,))), computed=True)
    assert here.table("messages", [ref]).num_rows == 3

"""Tables for a notebook: the rows that the ledger names and no others, of all runs or of one, and nothing is made."""

import pytest

from storage.errors import LayoutError, RunUnknown, SchemaError
from storage.maintenance.compact import MIN_FILES, compact
from storage.read.frames import Frames, existing_store
from storage.read.sql import ask
from storage.schemas.stage_tables import TABLES
from storage.store import open_store
from tests.fixtures.histories import add, counts, share


def looked_at(root):
    return Frames(existing_store(root, read_only=True))


def listed(frame, *columns):
    """The values of some columns, those of a row in one text."""
    return sorted(map(" ".join, frame.select(columns).collect().rows()))


def test_a_run_has_the_rows_that_it_shares(store, root):
    add(store, "1", "a", count=3)
    share(store, "1", "b")
    add(store, "2", "b", count=2)
    tables = looked_at(root)
    assert counts(tables["messages"]) == {"1": 3, "2": 2}, "each row once"
    assert counts(tables.run("a")["messages"]) == {"1": 3}
    assert counts(tables.run("b")["messages"]) == {"1": 3, "2": 2}
    assert set(listed(tables.run("b")["messages"], "run", "key")) == {"a 1", "b 2"}
    assert listed(tables["uses"], "run", "key", "computed_by") == ["a 1 a", "b 1 a", "b 2 b"]
    assert set(listed(tables.run("b")["ledger"], "run")) == {"b"}
    assert tables.run("b")["runs"].collect()["run"].to_list() == ["b"]


def test_compaction_changes_nothing_and_attempts_without_a_row_stay_hidden(store, root):
    for key in range(MIN_FILES + 1):
        add(store, str(key), count=key + 1, commit=key != 3)
    before = looked_at(root)["messages"].sort("key", "seq").collect()
    assert compact(store, store.slices.table("messages")) == MIN_FILES
    after = looked_at(root)
    assert len(after.store.slices.table("messages").active_files()) == 2
    assert after["messages"].sort("key", "seq").collect().equals(before)
    assert counts(after["messages"]) == {str(key): key + 1 for key in range(MIN_FILES + 1) if key != 3}


def test_every_table_is_there_with_its_columns(store, root):
    tables = looked_at(root)
    for name, table in TABLES.items():
        frame = tables[name]
        wanted = (
            table.arrow
            if name in ("ledger", "runs", "quarantines", "retirements", "notes", "judge_answers")
            else table.stored
        )
        assert frame.collect_schema().names() == wanted.names
        assert frame.collect().is_empty()


def test_looking_makes_no_store_and_no_table(store, root, tmp_path):
    with pytest.raises(LayoutError, match="there is no store"):
        looked_at(tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(LayoutError):
        looked_at(tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())
    add(store, "1")
    before = sorted(root.rglob("*"))
    tables = looked_at(root)
    for name in tables.names:
        tables[name].collect()
    assert sorted(root.rglob("*")) == before


def test_names_that_are_not_there_are_errors(store, root):
    tables = looked_at(root)
    with pytest.raises(SchemaError, match=r"no table 'rollouts'.*\n.*\n.*the tables are: examples, assignments"):
        tables["rollouts"]
    with pytest.raises(RunUnknown):
        tables.run("nobody")


def test_a_frame_is_a_snapshot(store, root):
    add(store, "1")
    tables = looked_at(root)
    assert counts(tables["messages"]) == {"1": 4}
    add(open_store(root), "2")
    assert counts(tables["messages"]) == {"1": 4}
    assert counts(looked_at(root)["messages"]) == {"1": 4, "2": 4}


@pytest.mark.engine
@pytest.mark.essential
def test_s3_answers_like_a_directory(s3, s3_root):
    with pytest.raises(LayoutError, match="there is no store"):
        looked_at(s3_root)
    store = open_store(s3_root)
    for key in ("1", "2", "3"):
        add(store, key, "a", count=int(key))
    share(store, "1", "b")
    tables = looked_at(s3_root)
    assert counts(tables["messages"]) == {"1": 1, "2": 2, "3": 3}
    assert counts(tables.run("b")["messages"]) == {"1": 1}
    question = "select key, count(*) as num from a.messages where step > 1 group by key order by key"
    assert ask(tables, question).to_pylist() == [{"key": "2", "num": 2}, {"key": "3", "num": 3}]

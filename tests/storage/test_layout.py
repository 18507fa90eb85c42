"""A root is a store of this layout, or empty, or refused untouched."""

import json

import pytest

from storage.delta.table import StoredTable
from storage.errors import LayoutError, SchemaError
from storage.roots import Root
from storage.store import LAYOUT, open_store
from tests.fixtures.commands import cases
from tests.fixtures.rows import append, entry, messages


def contents(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_a_new_root_says_its_layout(tmp_path):
    open_store(tmp_path / "deep" / "down")
    assert json.loads((tmp_path / "deep/down/format.json").read_text()) == {"layout": LAYOUT}


@cases(__file__, "no_stores")
def test_what_is_no_store_of_this_layout_is_refused_and_left_alone(tmp_path, file, text, words):
    (tmp_path / file).write_text(text)
    with pytest.raises(LayoutError, match=words) as caught:
        open_store(tmp_path)
    assert str(tmp_path) in caught.value.where
    assert contents(tmp_path) == [file] and (tmp_path / file).read_text() == text


def test_a_path_that_would_be_decoded_is_refused(tmp_path):
    with pytest.raises(LayoutError, match="percent"):
        open_store(tmp_path / "pro%20cent")
    assert contents(tmp_path) == []
    open_store(tmp_path / "store")
    assert open_store((tmp_path / "store").rename(tmp_path / "pro%20cent")).runs.names() == []


def test_a_root_must_be_named():
    with pytest.raises(LayoutError, match="a store cannot be at"):
        open_store("")


def test_a_root_left_by_a_process_that_died_at_its_founding_is_used(tmp_path):
    (tmp_path / ".format.json.0123").write_text('{"lay')
    open_store(tmp_path)
    assert (tmp_path / "format.json").exists()


def test_a_table_with_other_columns_is_refused(root):
    store = open_store(root)
    store.runs.record(run="r", event="started", kind="train", config={})
    runs = store.runs.table
    with pytest.raises(SchemaError, match=r"missing: .*more"):
        StoredTable(store.root, "runs", runs.schema.append(runs.schema.field("run").with_name("more")))


@pytest.mark.parametrize("name", ["with space", "100%", "ha#sh", "quest?ion", "brack[et]", "ünï"])
def test_a_root_may_have_any_name(tmp_path, name):
    store = open_store(tmp_path / name)
    for number in range(11):  # beyond the first checkpoint
        piece = append(store, attempt=f"a{number}")
    store.ledger.commit(entry("k", outputs=(piece,)))
    again = open_store(tmp_path / name)
    assert again.read(again.ledger.entries()[0].outputs).equals(messages())
    assert again.scan("messages").collect().height == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_a_store_that_another_process_has_just_made_is_one(root, monkeypatch):
    real, looks = Root.read, []

    def read(self, path):
        looks.append(path)
        if len(looks) == 1:
            open_store(root)  # the other's, after we have looked
            raise FileNotFoundError(path)
        return real(self, path)

    monkeypatch.setattr(Root, "read", read)
    assert open_store(root).ledger.entries() == []

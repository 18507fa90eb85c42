"""What attempts that died have left goes when it is old and nobody can want it any more, and not before."""

from pathlib import Path

import pytest

from storage.errors import StoreError
from storage.maintenance.compact import maintain
from storage.store import Store, open_store
from tests.fixtures.histories import age, contents, finish, publish, train
from tests.fixtures.rows import messages


@pytest.fixture
def left(root: Path, store: Store) -> Path:
    """Rows and weights of an attempt whose ledger row never came; the file with the rows."""
    train(store, "run", "xx")
    piece = store.append("messages", messages(4), run="run", step=2, key="k", attempt="died")
    publish(store, "died")
    return root / "tables/messages" / piece.files[0].path


def test_old_ones_go(root: Path, store: Store, left: Path) -> None:
    before = contents(store, ["run"])
    age(root, 200)
    seen = maintain(store, dry_run=True)
    assert left.exists() and seen.policies == ("died",) and {t.table: t.deleted for t in seen.tables}["messages"] == 1
    done = maintain(store)
    assert done.policies == ("died",) and {t.table: t.deleted for t in done.tables}["messages"] == 1
    assert not left.exists() and store.policies.names() == ["training-x", "training-xx"]
    assert contents(open_store(root), ["run"]) == before
    assert len(store.slices.table("messages").active_files()) == 4


def test_young_ones_stay(root: Path, store: Store, left: Path) -> None:
    age(root, 167)
    assert maintain(store).policies == ()
    assert left.exists() and store.policies.find("died")


def test_those_of_a_run_that_may_be_at_work_stay(root: Path, store: Store, left: Path) -> None:
    store.runs.record(run="run", event="resumed")
    age(root, 200)
    assert maintain(store).policies == ()
    assert left.exists() and store.policies.find("died")


def test_short_retention_is_refused_while_a_run_may_be_at_work(store: Store, left: Path) -> None:
    store.runs.record(run="run", event="resumed")
    with pytest.raises(StoreError, match="run may be at work"):
        maintain(store, 23)
    finish(store, "run")
    maintain(store, 0)
    assert not left.exists()

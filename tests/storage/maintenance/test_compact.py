"""Maintenance changes where rows lie and nothing else, but for what attempts that died have left when it is old."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.delta.parquet import encode
from storage.delta.snapshot import prune_log
from storage.errors import DamagedSlice, StoreError
from storage.maintenance.compact import compact, maintain, vacuum
from storage.store import open_store
from tests.fixtures.faults import happened
from tests.fixtures.histories import age, contents, fill, finish, publish, train
from tests.fixtures.rows import append, entry, messages


@pytest.mark.engine
def test_compaction_then_deletion_leaves_every_slice_readable(root, store):
    pieces = fill(store, 6) + fill(store, 5, "other")
    before = [store.read([piece]) for piece in pieces]
    scanned = store.scan("messages").sort("run", "step", "attempt", "seq").collect()
    ledger = store.ledger.entries()

    assert compact(store, store.slices.table("messages")) == 22
    assert len(store.slices.table("messages").active_files()) == 2
    age(root, 200)
    assert vacuum(store, store.slices.table("messages")) == (22, [])
    assert len(list((root / "tables/messages").rglob("run=*/*.parquet"))) == 2

    for reader in (store, open_store(root)):
        assert [reader.read([piece]) for piece in pieces] == before
        assert reader.read(pieces[::-1]).equals(pa.concat_tables(before[::-1]))
        assert reader.read([pieces[3]], ["message"])["message"].to_pylist() == [0, 1, 2]
        assert reader.scan("messages").sort("run", "step", "attempt", "seq").collect().equals(scanned)
        assert reader.ledger.entries() == ledger


def test_rows_that_the_ledger_does_not_name_are_left_where_they_are(root, store):
    fill(store, 6)
    flying = append(store, 4, step=6, key="run-6", attempt="in flight")
    table = store.slices.table("messages")
    compact(store, table)
    age(root, 200)
    vacuum(store, table)
    assert {each.path for each in table.active_files()} >= {flying.files[0].path}
    store.ledger.commit(entry("run-6", outputs=(flying,), step=6))
    assert store.read([flying]).equals(messages(4))


def test_young_files_are_not_deleted(root, store, table):
    age(root, 167)
    assert vacuum(store, table) == (0, [])
    assert vacuum(store, table, retention_hours=100) == (12, [])


def test_the_only_copy_of_a_slice_is_never_deleted(root, store, table):
    pieces = [piece for entry in store.ledger.entries() for piece in entry.outputs]
    (compacted,) = (root / table.place / each.path for each in table.active_files())
    data = bytearray(compacted.read_bytes())
    data[len(data) // 2] ^= 1
    compacted.write_bytes(data)
    age(root, 200)
    deleted, kept = vacuum(store, table)
    assert kept and deleted + len(kept) == 12
    assert store.read(pieces).num_rows == 30  # the originals of what was damaged are still there


@pytest.fixture
def alone(root, store, table):
    """Slices whose files are compacted into one and gone, and that one."""
    age(root, 200)
    vacuum(store, table)
    (compacted,) = (root / table.place / each.path for each in table.active_files())
    return [piece for entry in store.ledger.entries() for piece in entry.outputs], compacted


@pytest.mark.fault("files", "a byte of a compacted file is another, each 97th", "DamagedSlice, or the same rows")
@pytest.mark.engine
def test_a_damaged_copy_is_found_when_nothing_else_is_left(root, store, alone):
    pieces, compacted = alone
    good, before, found = compacted.read_bytes(), store.read(pieces), 0
    for place in range(4, len(good), 97):
        data = bytearray(good)
        data[place] ^= 16
        compacted.write_bytes(data)
        try:
            assert open_store(root).read(pieces).equals(before)  # some bytes of a page's header mean nothing
        except DamagedSlice:
            found += 1
    happened(f"{found} of {len(good) // 97} seen")
    assert found > len(good) / 97 / 3


@pytest.mark.fault("files", "a compacted file is written again with one value changed", "DamagedSlice")
def test_another_value_in_a_compacted_file_is_found(root, alone):
    pieces, compacted = alone
    rows = pq.read_table(compacted, partitioning=None)
    roles = rows["role"].to_pylist()
    place, field = rows.schema.get_field_index("role"), rows.schema.field("role")
    others = rows.set_column(place, field, pa.array([*roles[:-1], "other"]))
    compacted.write_bytes(encode([others]))
    happened(f"role {roles[-1]} is other")
    with pytest.raises(DamagedSlice, match="digest differs"):
        open_store(root).read(pieces)


@pytest.mark.engine
def test_ledger_and_runs_are_compacted_under_a_reader_that_has_them_open(root, store):
    elsewhere = open_store(root)
    fill(store, 10)
    for number in range(9):
        store.runs.record(run="run", event=f"event-{number}", kind="train", config={"number": number})
    assert len(elsewhere.ledger.entries()) == 10
    before = store.ledger.entries()
    maintain(store)
    assert len(store.ledger.table.active_files()) == 1
    assert len(store.runs.table.active_files()) == 1
    late = store.ledger.commit(entry("late", step=99))
    for reader in (store, elsewhere, open_store(root)):
        assert reader.ledger.entries() == [*before, late]
        assert [event.event for event in reader.runs.events("run")] == [f"event-{n}" for n in range(9)]
        assert reader.ledger.commit(entry("run-3", attempt="again")) == before[3]


def test_a_second_compactor_that_looked_too_early_changes_nothing(root, store):
    fill(store, 8)
    other = open_store(root)
    stale = other.slices.table("messages")
    stale.refresh()
    compact(store, store.slices.table("messages"))
    stale.refresh = lambda: stale.version
    compact(other, stale)
    assert len(open_store(root).slices.table("messages").active_files()) == 1
    assert open_store(root).scan("messages").collect().height == 8 * 5


@pytest.mark.engine
def test_old_checkpoints_are_swept(root, store):
    fill(store, 18)
    table = store.slices.table("messages")
    log = root / table.place / "_delta_log"
    assert len(list(log.glob("*.checkpoint.parquet"))) == 3
    assert prune_log(store.root, table.place) == 0, "young files stay"
    age(root, 1)
    assert prune_log(store.root, table.place) == 20
    assert sorted(path.name[:20] for path in log.glob("*.checkpoint.parquet")) == [f"{19:020d}", f"{29:020d}"]
    assert min(path.name for path in log.glob("*.json")) == f"{19:020d}.json"
    assert len(open_store(root).ledger.entries()) == 18


@pytest.fixture
def table(store):
    """The messages of six pieces of work, compacted, with the files that were merged."""
    fill(store, 6)
    table = store.slices.table("messages")
    compact(store, table)
    return table


@pytest.fixture
def left(root, store):
    """Rows and weights of an attempt whose ledger row never came; the file with the rows."""
    train(store, "run", "xx")
    piece = append(store, 4, step=2, attempt="died")
    publish(store, "died")
    return root / "tables/messages" / piece.files[0].path


def test_old_ones_go(root, store, left):
    before = contents(store, ["run"])
    age(root, 200)
    for dry_run in (True, False):
        done = maintain(store, dry_run=dry_run)
        assert done.policies == ("died",) and {t.table: t.deleted for t in done.tables}["messages"] == 1
        assert left.exists() == dry_run
    assert store.policies.names() == ["training-x", "training-xx"]
    assert contents(open_store(root), ["run"]) == before
    assert len(store.slices.table("messages").active_files()) == 4


@pytest.mark.parametrize(("event", "hours"), [("finished", 167), ("resumed", 200)], ids=["young", "of a run at work"])
def test_those_that_may_be_needed_stay(root, store, left, event, hours):
    store.runs.record(run="run", event=event)
    age(root, hours)
    assert maintain(store).policies == ()
    assert left.exists() and store.policies.find("died")


def test_short_retention_is_refused_while_a_run_may_be_at_work(store, left):
    store.runs.record(run="run", event="resumed")
    with pytest.raises(StoreError, match="run may be at work"):
        maintain(store, 23)
    finish(store, "run")
    maintain(store, 0)
    assert not left.exists()

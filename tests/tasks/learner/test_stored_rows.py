"""Packed rows in a store: each rank reads its own, to the bit what was packed, and what is damaged is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from storage.errors import DamagedSlice
from storage.read.groups import open_groups
from storage.schemas import contract
from storage.store import open_store
from tasks.learner.protocol import LearnerError
from tasks.learner.rows import BatchReader
from tests.fixtures.faults import happened
from tests.fixtures.packed import STREAMS, all_rows, batches, batches_from_table, changed, sample, stored_batch
from tests.fixtures.pictures import packed_tables
from tests.fixtures.waiting import PATIENCE

ROWS = [[sample(f"{row}{name}", 5 + row, 10 * row + i) for i, name in enumerate("ab")] for row in range(7)]


def planned(reference, num_ranks):
    """Return what each rank has planned of a batch, or what it raised: they meet in threads of this process."""
    parts, meeting = {}, threading.Barrier(num_ranks)

    def gather(rank, part):
        parts[rank] = part
        meeting.wait(PATIENCE)
        of_all = [parts[each] for each in range(num_ranks)]
        meeting.wait(PATIENCE)
        return of_all

    def plan(rank):
        try:
            return BatchReader(open_groups(reference.store), reference).plan(rank, partial(gather, rank), num_ranks)
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(plan, range(num_ranks)))


def assert_same(row, other):
    assert (row.row, row.sample_ids, row.borders) == (other.row, other.sample_ids, other.borders)
    assert np.array_equal(row.token_ids, other.token_ids)
    assert all(np.array_equal(row.streams[name], other.streams[name]) for name in STREAMS)
    assert images_of(row) == images_of(other)


def images_of(row):
    """Return places and values of a row's images, None without any."""
    shown = row.images
    return shown and (shown.offsets, shown.counts, shown.pixels.tolist(), shown.grids.tolist())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("group_bytes", [1, 1 << 18])
def test_ranks_have_the_rows_that_one_reader_of_the_table_has(tmp_path, monkeypatch, num_ranks, group_bytes):
    monkeypatch.setattr(contract, "ROW_GROUP_BYTES", group_bytes)
    table = batches(ROWS, updates=[0, 0, 0, 0, 1, 1, 1])
    reference = stored_batch(tmp_path, table, parts=3)
    expected = batches_from_table(table)
    for rank, found in enumerate(planned(reference, num_ranks)):
        assert [each.denominators for each in found] == [each.denominators for each in expected]
        for batch, whole in zip(found, expected, strict=True):
            own = [plan for plan in batch.on_rank(rank, num_ranks) if plan is not None]
            for plan, other in zip(own, whole.plan[rank::num_ranks], strict=True):
                row = whole.load(other)
                assert_same(batch.load(plan), row)
                assert plan.num_weighted == other.num_weighted == len(row.weighted)


def test_images_are_those_of_the_table(tmp_path):
    made = packed_tables()
    reference = stored_batch(tmp_path, made["batches"], made["batch_images"], parts=2)
    ((found,),) = planned(reference, 1)
    (expected,) = batches_from_table(made["batches"], made["batch_images"])
    rows = all_rows(found)
    assert any(row.images for row in rows)
    for row, other in zip(rows, all_rows(expected), strict=True):
        assert_same(row, other)


def file_of(directory, piece):
    """Return the file of a slice of packed rows."""
    return directory / "rows" / "tables" / "batches" / piece.files[0].path


@pytest.mark.fault(
    "storage", "a byte of packed rows is flipped before a step, or between checking and reading", "DamagedSlice"
)
def test_damaged_rows_are_refused_by_every_rank_in_the_words_of_the_store(tmp_path):
    reference = stored_batch(tmp_path, batches(ROWS), parts=3)
    path = file_of(tmp_path, reference.rows[1])
    (intact,) = planned(reference, 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    happened("byte flipped")
    with pytest.raises(DamagedSlice) as said:
        open_store(tmp_path / "rows").read(reference.rows)
    for num_ranks in (1, 2):
        for error in planned(reference, num_ranks):
            assert isinstance(error, DamagedSlice) and str(error) == str(said.value)
    with pytest.raises(DamagedSlice):
        all_rows(intact[0])


def test_a_row_that_would_spoil_a_gradient_is_refused_by_every_rank(tmp_path):
    table = changed(batches(ROWS), "cu_seqlens", [0, 5], row=4)
    for error in planned(stored_batch(tmp_path, table, parts=3), 2):
        assert isinstance(error, LearnerError) and "batches row 4: cu_seqlens (0, 5) does not rise" in str(error)


def test_rows_that_compaction_has_moved_are_found(tmp_path):
    from storage.maintenance.compact import compact
    from tests.fixtures.rows import entry

    reference = stored_batch(tmp_path, batches([row for row in ROWS for _ in range(2)][:9], None), parts=9)
    store = open_store(tmp_path / "rows")
    store.ledger.commit(entry("k", "a", outputs=reference.rows, stage="packing", attempt="x"))
    assert compact(store, store.table("batches")) == 9
    before = [all_rows(found) for found in planned(reference, 1)[0]]
    for piece in reference.rows:
        file_of(tmp_path, piece).unlink()
    after = [all_rows(found) for found in planned(reference, 1)[0]]
    for row, other in zip(before[0], after[0], strict=True):
        assert_same(row, other)

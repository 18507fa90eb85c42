"""Packed rows are taken apart exactly, and every fault that would train wrong numbers is refused."""

from dataclasses import replace

import numpy as np
import pytest

from tasks.learner.protocol import LearnerError
from tasks.learner.rows import batches_from_table, idle_row
from tests.fixtures.packed import STREAMS, batches, changed, padding, sample


@pytest.fixture
def table():
    return batches([[sample("a", 4, 1), sample("b", 3, 2)], [sample("c", 5, 3, "ce")]])


def test_rows_are_what_was_packed(table):
    (batch,) = batches_from_table(table, 1)
    first = batch.rows[0]
    assert (first.sample_ids, first.borders) == (("a", "b"), (0, 4, 7))
    assert first.weighted.tolist() == [2, 3, 5, 6]
    assert first.positions().tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert first.token_ids.dtype == np.int64
    assert first.streams["logprobs"].tolist() == table["logprobs"][0].as_py()
    assert {stream.dtype for stream in first.streams.values()} == {np.dtype(np.float32)}
    assert batch.denominators == {"rl": 4, "ce": 3, "ref_kl": 0}


def test_updates_are_batches_with_denominators_of_their_own():
    rows = [[sample("a", 4, 1)], [sample("b", 6, 2)], [sample("c", 8, 3)]]
    found = batches_from_table(batches(rows, updates=[0, 1, 1]), 1)
    assert [batch.denominators["rl"] for batch in found] == [2, 7]
    assert [[row.sample_ids for row in batch.rows] for batch in found] == [[("a",)], [("b",), ("c",)]]


def test_a_rank_without_a_row_idles_with_two_weightless_tokens():
    rows = [[sample("a", 4, 1)], [sample("b", 4, 2)], [sample("c", 4, 3)]]
    (batch,) = batches_from_table(batches(rows, places=[(0, 0), (1, 0), (0, 1)]), 2)
    assert [row.sample_ids for row in batch.on_rank(0)] == [("a",), ("c",)]
    idle = batch.on_rank(1)[1]
    assert (len(idle.token_ids), idle.weighted.size, idle.sample_ids) == (2, 0, ())
    assert (idle.rank, idle.micro_step) == (1, 1)


def test_an_idle_row_is_exactly_this():
    idle = idle_row(3, 5)
    assert (idle.row, idle.rank, idle.micro_step, idle.sample_ids, idle.borders) == (-1, 3, 5, (), (0, 2))
    assert idle.token_ids.tolist() == [0, 0] and idle.token_ids.dtype == np.int64
    assert {name: stream.tolist() for name, stream in idle.streams.items()} == {
        name: [1, 1] if name == "temperatures" else [0, 0] for name in STREAMS
    }
    assert {stream.dtype for stream in idle.streams.values()} == {np.dtype(np.float32)}


def test_a_segment_may_be_one_token():
    (batch,) = batches_from_table(batches([[sample("a", 4, 1), replace(padding(1), sample_id="b")]]), 1)
    assert batch.rows[0].borders == (0, 4, 5) and batch.rows[0].positions().tolist() == [0, 1, 2, 3, 0]


def test_a_padding_row_is_welcome():
    (batch,) = batches_from_table(batches([[sample("a", 4, 1)], [padding(3)]]), 1)
    assert batch.rows[1].weighted.size == 0


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("token_ids", [1, 2, 3], "differ in length"),
        ("cu_seqlens", [0, 4, 6], "does not rise from 0 to 7"),
        ("cu_seqlens", [0, 4, 4, 7], "does not rise"),
        ("cu_seqlens", [1, 7], "does not rise"),
        ("logprobs", [0.0, 0.0, float("nan"), 0.0, 0.0, 0.0, 0.0], "logprobs is not finite"),
        ("temperatures", [0.0] * 7, "must be positive"),
        ("rl_weights", [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0], "first token of a segment"),
        ("rl_weights", [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0], "first token of a segment"),
        ("ref_kl_weights", [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], "rl and ref_kl weight"),
        ("sample_ids", ["a"], "1 sample_ids for 2 segments"),
        ("sample_ids", [], "padding row"),
        ("rl_tokens", 5, "rl_tokens says"),
        ("ce_tokens", 0, "ce_tokens says"),
        ("rank", 1, "packing.data_parallel"),
        ("micro_step", 1, "share a rank and a micro_step"),
        ("update", 2, "numbered from 0"),
    ],
)
def test_a_planted_fault_is_refused(table, column, values, message):
    assert batches_from_table(table, 1)
    with pytest.raises(LearnerError, match=message):
        batches_from_table(changed(table, column, values), 1)


def test_nothing_to_train_is_refused(table):
    with pytest.raises(LearnerError, match="no rows"):
        batches_from_table(table.slice(0, 0), 1)
    with pytest.raises(LearnerError, match="no token has weight"):
        batches_from_table(batches([[padding(4)]]), 1)

"""Packed rows are taken apart exactly, and every fault that would train wrong numbers is refused."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.learner import rows
from tasks.learner.protocol import BatchReference, LearnerError
from tests.fixtures.builders import exactly
from tests.fixtures.packed import (
    STREAMS,
    InMemory,
    all_rows,
    batch_of,
    batches,
    batches_from_table,
    changed,
    padding,
    row_of,
    sample,
)
from tests.fixtures.pictures import packed_tables, tensors


def test_rows_are_what_was_packed():
    samples = [sample("a", 4, 1), sample("b", 3, 2)]
    batch = batch_of([samples, [sample("c", 5, 3, "ce")]])
    first = all_rows(batch)[0]
    assert (first.sample_ids, first.borders) == (("a", "b"), (0, 4, 7))
    assert first.weighted.tolist() == [2, 3, 5, 6]
    assert first.positions().tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert first.token_ids.dtype == np.int64
    assert first.streams["logprobs"].tolist() == [each for part in samples for each in part.streams["logprobs"]]
    assert {stream.dtype for stream in first.streams.values()} == {np.dtype(np.float32)}
    assert batch.denominators == {"rl": 4, "ce": 3, "ref_kl": 0}


def test_updates_are_batches_with_denominators_of_their_own():
    rows = [[sample("a", 4, 1)], [sample("b", 6, 2)], [sample("c", 8, 3)]]
    found = batches_from_table(batches(rows, updates=[0, 1, 1]))
    assert [batch.denominators["rl"] for batch in found] == [2, 7]
    assert [[row.sample_ids for row in all_rows(batch)] for batch in found] == [[("a",)], [("b",), ("c",)]]


@pytest.mark.parametrize("most", [0, 1 << 27])
def test_rows_come_with_their_images(monkeypatch, most):
    """Whether tensors of earlier rows are still in memory or are read again."""
    monkeypatch.setattr(rows, "MOST_TENSORS", most)
    grids = {"x": (1, 4, 2), "y": (1, 2, 2)}
    pixels = {
        each["digest"]: np.frombuffer(each["data"], np.float32).reshape(each["shape"])
        for each in tensors(grids).to_pylist()
        if each["name"] == "pixel_values"
    }
    made = packed_tables(grids, tokens_per_row=10)
    shown = defaultdict(list)
    for image in made["batch_images"].to_pylist():
        shown[image["row"]].append((image["offset"], image["digest"]))
    groups = InMemory([made["batches"]], [made["batch_images"].take(list(reversed(range(4))))])
    reader = rows.BatchReader(groups, BatchReference("", groups.slices(0), groups.slices(1)))
    (batch,) = reader.plan()
    assert shown == {0: [(1, "x"), (6, "x")], 1: [(0, "y"), (1, "x")]}
    for number in [*shown, *reversed(shown)]:
        images = batch.load(batch.plan[number]).images
        offsets, names = zip(*shown[number], strict=True)
        assert images.offsets == offsets and images.counts == tuple(np.prod(grids[name]) // 4 for name in names)
        assert np.array_equal(images.pixels, np.concatenate([pixels[name] for name in names]))
        assert images.grids.tolist() == [list(grids[name]) for name in names]
        assert most or reader._tensors.keys() == set(names), "more is kept than the row has"
    assert len(reader._tensors) == 2 or not most


def test_a_row_whose_image_has_no_tensors_is_named():
    made = packed_tables()
    without = made["batch_images"].filter(pc.list_value_length(pc.field("names")) == 0)
    with pytest.raises(LearnerError, match=f"batches row {min(without['row'].to_pylist())}: image x has no"):
        batches_from_table(made["batches"], without)


def test_each_rank_reads_and_checks_its_slices_and_knows_all_rows():
    table = batches([[sample(name, 4 + place, place)] for place, name in enumerate("abcdef")])
    groups = InMemory([table.slice(0, 2), table.slice(2, 1)], [table.slice(3, 1)], [table.slice(4, 2)])
    reference = BatchReference("", groups.slices(0, 1, 2))
    seen = {0: [], 1: []}
    parts = {}

    def plan(rank, gather):
        reader = rows.BatchReader(groups, reference)
        return reader.plan(rank, gather, 2, check=lambda row: seen[rank].append(row.row))

    for rank in range(2):

        def alone(part, rank=rank):
            parts[rank] = part  # of the images, then of the rows
            return [part]

        with pytest.raises(LearnerError, match="rl_tokens says"):
            plan(rank, alone)
    assert seen == {0: [0, 1, 2, 4, 5], 1: [3]} and [sorted(parts[rank]) for rank in range(2)] == [[0, 2], [1]]
    for rank in range(2):
        (batch,) = plan(rank, lambda part: [part and parts[other] for other in range(2)])
        assert [(each.row, each.sample_ids) for each in batch.plan] == [
            (row, (name,)) for row, name in enumerate("abcdef")
        ]


def test_an_idle_row_is_exactly_this():
    idle = rows.idle_row()
    assert (idle.row, idle.sample_ids, idle.borders) == (-1, (), (0, 2))
    assert idle.token_ids.tolist() == [0, 0] and idle.token_ids.dtype == np.int64
    assert {name: stream.tolist() for name, stream in idle.streams.items()} == {
        name: [1, 1] if name == "temperatures" else [0, 0] for name in STREAMS
    }
    assert {stream.dtype for stream in idle.streams.values()} == {np.dtype(np.float32)}


@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=6), num_ranks=st.integers(1, 8))
def test_ranks_that_share_a_row_have_each_token_and_predict_each_weighted_one_once(lengths, num_ranks):
    row = row_of([sample(f"s{number}", length, number) for number, length in enumerate(lengths)])
    parts = [row.part(rank, num_ranks) for rank in range(num_ranks)]
    own = [part.token_ids for part in parts]
    (length,) = {len(each) for each in own}
    padding = length * num_ranks - len(row.token_ids)
    assert 0 <= padding < num_ranks and {part.borders[-1] for part in parts} == {length * num_ranks}
    assert {part.borders[: len(row.borders)] for part in parts} == {row.borders}
    assert np.concatenate(own).tolist() == [*row.token_ids.tolist(), *[0] * padding]
    positions = np.concatenate([part.positions for part in parts]).tolist()
    assert positions == [*row.positions().tolist(), *range(padding)]
    predictors = [part.predictors + rank * length for rank, part in enumerate(parts)]
    assert (np.concatenate(predictors) + 1).tolist() == row.weighted.tolist()
    for part in parts:
        assert ((part.predictors >= 0) & (part.predictors < length)).all()
        assert part.targets.tolist() == row.token_ids[row.weighted[part.own]].tolist()


@given(num_rows=st.integers(1, 9), num_ranks=st.integers(1, 5))
def test_rows_are_dealt_in_turn_to_any_number_of_ranks(num_rows, num_ranks):
    batch = batch_of([[sample(f"s{number}", 4, number)] for number in range(num_rows)])
    dealt = [[plan.row if plan else -1 for plan in batch.on_rank(rank, num_ranks)] for rank in range(num_ranks)]
    assert len({len(rows) for rows in dealt}) == 1
    in_turn = [row for step in zip(*dealt, strict=True) for row in step]
    assert in_turn[:num_rows] == list(range(num_rows)) and set(in_turn[num_rows:]) <= {-1}


def test_a_segment_may_be_one_token():
    row = row_of([sample("a", 4, 1), replace(padding(1), sample_id="b")])
    assert row.borders == (0, 4, 5) and row.positions().tolist() == [0, 1, 2, 3, 0]


def test_a_padding_row_is_welcome():
    assert all_rows(batch_of([[sample("a", 4, 1)], [padding(3)]]))[1].weighted.size == 0


LENGTHS = {"token_ids": 3} | dict.fromkeys(STREAMS, 5)


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        (
            "token_ids",
            [1, 2, 3],
            f"batches row 1: per-token columns differ in length: {LENGTHS}",
        ),
        ("cu_seqlens", [0, 4], "batches row 1: cu_seqlens (0, 4) does not rise from 0 to 5 tokens"),
        ("cu_seqlens", [0], "batches row 1: cu_seqlens (0,) does not rise from 0 to 5 tokens"),
        ("cu_seqlens", [1, 5], "batches row 1: cu_seqlens (1, 5) does not rise from 0 to 5 tokens"),
        ("cu_seqlens", [0, 2, 2, 5], "batches row 1: cu_seqlens (0, 2, 2, 5) does not rise from 0 to 5 tokens"),
        ("logprobs", [0, 0, float("inf"), 0, 0], "batches row 1: logprobs is not finite on a weighted token"),
        (
            "temperatures",
            [1, 1, 0, 1, 1],
            "batches row 1: temperatures must be positive on weighted tokens; greedy samples cannot train",
        ),
        (
            "ce_weights",
            [1, 0, 1, 1, 1],
            "batches row 1: the first token of a segment has weight, but nothing in its segment predicts it",
        ),
        (
            "cu_seqlens",  # so that the third token begins a segment
            [0, 2, 5],
            "batches row 1: the first token of a segment has weight, but nothing in its segment predicts it",
        ),
        (
            "ref_kl_weights",
            [0, 0, 0, 1, 0],
            "batches row 1: a token has rl and ref_kl weight, but the advantages column carries one signal",
        ),
        ("sample_ids", ["b", "c"], "batches row 1: 2 sample_ids for 1 segments"),
        ("sample_ids", [], "batches row 1: a padding row (no sample_ids) has weighted tokens"),
        ("rl_tokens", 3, "batches: rl_tokens says [3, 5], but 5 tokens have rl weight"),
        ("ref_kl_tokens", 1, "batches: ref_kl_tokens says [0, 1], but 0 tokens have ref_kl weight"),
        ("update", 2, "batches: updates [0, 2] are not numbered from 0 without gaps"),
    ],
)
def test_the_row_and_the_column_are_named(column, values, said):
    table = batches([[sample("a", 4, 1)], [sample("b", 5, 2)]])
    assert batches_from_table(table)
    with pytest.raises(LearnerError, match=exactly(said)):
        batches_from_table(changed(table, column, values, row=1))


@pytest.mark.parametrize(
    ("num_rows", "said"),
    [
        (1, "batches: no token has weight in any component; nothing was trained"),
        (0, "batches: no rows; nothing was trained"),
    ],
)
def test_that_nothing_was_trained_is_said(num_rows, said):
    with pytest.raises(LearnerError, match=exactly(said)):
        batches_from_table(batches([[padding(4)]] * num_rows))

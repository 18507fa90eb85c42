"""Packing: rows as the learner maps them, every sample once, weights never across a border."""

import errno
import itertools
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.arrays.permutation import digest
from tasks.arrays.samples import PackingBreach
from tasks.packing.stage import STAGE, TOKEN_BYTES
from tests.fixtures.builders import exactly, exchange, message, trace, view
from tests.fixtures.faults import happened
from tests.fixtures.packed import changed
from tests.fixtures.parts import in_slices
from tests.fixtures.small_disks import mounted
from tests.fixtures.stages import forked, group, inputs, of_lengths, packed, packing

STREAMS = ("token_ids", "logprobs", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")


def test_a_row_by_hand():
    traces = [trace("a", temperature=0.5), trace("b", reward=0.0)]
    messages = [
        *exchange("a", prompt=[1, 2], completion=[3, 4, 5], logprobs=[-0.25, -0.5, -0.75]),
        *exchange("b", prompt=[6], completion=[7]),
    ]
    (row,) = packed(inputs(traces, messages), tokens_per_row=8)
    assert row["sample_ids"] == ["a/0", "b/0"] and row["cu_seqlens"] == [0, 5, 7]
    assert (row["row"], row["update"], row["rank"], row["micro_step"]) == (0, 0, 0, 0)
    assert row["token_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert row["logprobs"] == [0, 0, -0.25, -0.5, -0.75, 0, -1]
    assert row["temperatures"] == [0.5] * 5 + [1.0] * 2
    assert row["advantages"] == [0, 0, 0.5, 0.5, 0.5, 0, -0.5]
    assert row["rl_weights"] == [0, 0, 1, 1, 1, 0, 1]
    assert (row["rl_tokens"], row["ce_tokens"], row["ref_kl_tokens"]) == (4, 0, 0)


def test_the_first_token_of_a_segment_has_no_weight_even_if_it_was_sampled():
    messages = [message(name, tokens=[1, 2, 3], sampled=True) for name in "ab"]
    (row,) = packed(inputs([trace("a"), trace("b", reward=0.0)], messages))
    assert row["rl_weights"] == [0, 1, 1] * 2 and row["advantages"] == [0, 0.5, 0.5, 0, -0.5, -0.5]
    assert row["rl_tokens"] == 4


def test_a_forked_trace_is_two_samples_with_the_shared_tokens_in_both():
    (row,) = packed(inputs([trace("a")], forked("a"), "supervised"))
    assert row["sample_ids"] == ["a/1", "a/0"] and row["ce_tokens"] == 5
    assert row["token_ids"] == [1, 2, 3, 4, 7, 8, 9, 1, 2, 3, 4, 5, 6]
    assert row["ce_weights"] == [0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 1]


def test_samples_without_weight_are_not_packed():
    (row,) = packed(inputs([trace("a"), trace("b", reward=0.0), trace("c", group_id="g1", reward=None)]))
    assert row["sample_ids"] == ["a/0", "b/0"]


def test_an_advantage_of_zero_is_trained_where_that_is_asked_for_alone():
    """prime-rl's default, `filter_zero_advantages`, leaves such tokens out of the rl component and its denominator."""
    traces = [trace("a", reward=0.0), trace("b", reward=0.5), trace("c")]
    tables = inputs(traces)
    (out,), (held,) = packed(tables), packed(tables, zero_advantages=True)
    assert out["sample_ids"] == ["a/0", "c/0"] and out["rl_tokens"] == 4
    assert held["sample_ids"] == ["a/0", "b/0", "c/0"] and held["rl_tokens"] == 6
    assert held["rl_weights"] == [0, 0, 0, 1, 1] * 3 and held["advantages"][5:10] == [0] * 5
    (taught,) = packed(inputs(traces, algorithm="supervised"))
    assert taught["ce_tokens"] == 6, "only the rl component has advantages"


def test_nothing_to_train_is_a_batch_without_rows():
    assert packed(inputs([])) == packed(inputs([trace("a", reward=None)])) == []


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(2, 32), min_size=1, max_size=40),
    num_ranks=st.integers(1, 5),
    num_updates=st.integers(1, 4),
)
def test_every_sample_is_in_one_row_whole_and_ranks_keep_step(lengths, num_ranks, num_updates):
    tables = of_lengths(lengths)
    rows = packed(tables, tokens_per_row=32, data_parallel=num_ranks, updates_per_step=num_updates)
    found = {}
    for row in rows:
        assert row["cu_seqlens"][0] == 0 and row["cu_seqlens"][-1] == len(row["token_ids"]) <= 32
        for sample, (start, end) in zip(
            row["sample_ids"], itertools.pairwise(row["cu_seqlens"]), strict=bool(row["sample_ids"])
        ):
            assert sample not in found
            found[sample] = row["token_ids"][start:end]
            assert row["ce_weights"][start:end] == [0] + [1] * (end - start - 1)
    assert found == {f"t{i}/0": [i] * length for i, length in enumerate(lengths)}
    assert [row["row"] for row in rows] == list(range(len(rows)))
    for update in range(min(num_updates, len(lengths))):
        own = [row for row in rows if row["update"] == update]
        places = [(row["micro_step"], row["rank"]) for row in own]
        assert places == [divmod(place, num_ranks) for place in range(len(own))] and len(own) % num_ranks == 0
        assert {row["ce_tokens"] for row in own} == {sum(np.count_nonzero(row["ce_weights"]) for row in own)}
    assert {row["update"] for row in rows} == set(range(min(num_updates, len(lengths))))


def test_updates_have_equal_numbers_of_samples_and_whole_groups_where_they_can():
    rows = packed(of_lengths([4] * 24), updates_per_step=3)
    samples = [{s for row in rows if row["update"] == update for s in row["sample_ids"]} for update in range(3)]
    assert [len(own) for own in samples] == [8, 8, 8]
    groups = [{int(sample[1:-2]) // 2 for sample in own} for own in samples]
    assert [len(own) for own in groups] == [4, 4, 4] and not groups[0] & groups[1] | groups[1] & groups[2]


def test_updates_take_groups_in_the_order_of_their_hashes():
    rows = packed(of_lengths([4] * 12), updates_per_step=6)
    found = [{f"g{int(sample[1:-2]) // 2}" for sample in row["sample_ids"]} for row in rows]
    order = sorted((f"g{number}" for number in range(6)), key=lambda group: digest("update", group))
    assert found == [{group} for group in order] and order != sorted(order)


def test_groups_share_rows_where_prompts_are_computed_once_and_keys_say_so():
    names = [f"{group}{number}" for number in range(4) for group in "abc"]
    traces = [trace(name, group_id=name[0], reward=float(name[1])) for name in names]
    messages = [row for name in names for row in exchange(name, prompt=[5] * 60, completion=[7] * (4 + int(name[1])))]
    for shares, num_groups in ((False, 3), (True, 1)):
        rows = packed(inputs(traces, messages), tokens_per_row=262, shared_prefixes=shares)
        assert len({sample[0] for sample in rows[0]["sample_ids"]}) == num_groups
        assert ("shared_prefixes" in view(STAGE, packing={"shared_prefixes": shares}).content()["packing"]) == shares


def test_messages_may_come_in_any_order():
    traces = [trace("a"), trace("b", reward=0.0)]
    messages = [*exchange("a", completion=[4, 5]), *exchange("b", completion=[6, 7, 8])]
    (expected,) = packed(inputs(traces, messages))
    for order in ([3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]):
        assert packed(inputs(traces, [messages[i] for i in order])) == [expected]
    assert expected["token_ids"] == [1, 2, 3, 6, 7, 8, 1, 2, 3, 4, 5]


def test_token_ids_are_exact_however_large():
    largest = 2**24 + 1  # the first whole number that single precision cannot hold
    (row,) = packed(inputs([trace("a")], exchange("a", prompt=[largest], completion=[largest]), "supervised"))
    assert row["token_ids"] == [largest, largest]


def test_a_sample_of_one_token_has_nothing_that_predicts_it_and_one_of_none_is_left_out():
    messages = [message("a", tokens=[1], sampled=True), *exchange("b"), message("c", tokens=[])]
    (row,) = packed(inputs([trace(name) for name in "abc"], messages, "supervised"))
    assert row["sample_ids"] == ["b/0"] and row["ce_weights"] == [0, 0, 0, 1, 1]


def test_a_padding_row_costs_two_tokens_and_weighs_nothing():
    rows = packed(of_lengths([3]), data_parallel=3)
    assert [(row["rank"], row["micro_step"]) for row in rows] == [(0, 0), (1, 0), (2, 0)]
    for row in rows[1:]:
        assert row["sample_ids"] == [] and row["cu_seqlens"] == [0, 2]
        assert row["temperatures"] == [1.0, 1.0]
        assert all(row[name] == [0, 0] for name in STREAMS)
        assert row["ce_tokens"] == 2


@pytest.mark.parametrize("borders", [[0.25, 0.5, 0.75], [0.5], []])
def test_of_samples_in_parts_the_one_that_was_sampled_greedily_is_named(borders):
    """Nobody asks at which temperature a sample without weight was sampled."""
    tables = of_lengths([3, 4, 5, 6], "grpo")
    cut = tables | {"samples": in_slices(tables["samples"], borders)}
    for greedy in range(4):
        said = (
            f"table traces, column temperature: sample t{greedy}/0 was made at temperature 0, which leaves no "
            "distribution to train on. Nothing was trained. Set rollout.temperature, and that of the environment, "
            "above zero."
        )
        with pytest.raises(PackingBreach, match=exactly(said)):
            packed(cut | {"traces": changed(tables["traces"], "temperature", 0.0, greedy)})
    (row,) = packed(inputs([trace("a", group_id="g1", temperature=0.0), *group(1.0, 0.0)]))
    assert row["sample_ids"] == ["g0-0/0", "g0-1/0"]


@pytest.mark.parametrize(("limit", "rows_of_parts"), [(12, [2] * 4), (4, [1] * 8)])
def test_rows_are_written_in_parts_that_are_as_large_as_allowed(monkeypatch, limit, rows_of_parts):
    tables = of_lengths([6, 6, 5, 5, 5, 4, 4, 4])
    monkeypatch.setattr("tasks.packing.stage.PART_BYTES", limit * TOKEN_BYTES)
    made = packing(tables, view(STAGE, packing={"tokens_per_row": 6}))
    assert made.keys() == {"batches"}
    assert [part.num_rows for part in made["batches"]] == rows_of_parts


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 64 KiB."""
    yield from mounted(tmp_path / "disk", "64k")


@pytest.mark.fault(
    "disk", "the disk of temporary files is full", "one clear error, and no signal that ends the process"
)
def test_a_full_disk_of_temporary_files_is_an_error(small_disk, monkeypatch):
    tables = of_lengths([1 << 15])  # 128 KiB of each stream
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    monkeypatch.setattr("tasks.packing.stage.SPOOLED", 0)
    with pytest.raises(OSError, match="No space left on device") as caught:
        packed(tables, tokens_per_row=1 << 15)
    assert caught.value.errno == errno.ENOSPC
    happened(caught.value)


def test_a_packer_that_loses_a_sample_stops_the_stage(monkeypatch):
    monkeypatch.setattr("tasks.packing.stage.pack", lambda *_: [[0]])
    with pytest.raises(PackingBreach, match=r"sample t\d/0 is in 0 rows"):
        packed(of_lengths([3, 3]))

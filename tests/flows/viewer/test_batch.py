"""The packed batch: against the tables themselves, before and after training; and what its pages make of it."""

from itertools import pairwise

import polars as pl
import pytest

from flows.orchestration.states import GateRefused
from flows.queries.batch import decisions, packed_step, row_samples, samples, updates
from flows.queries.store_reader import StoreReader
from flows.queries.views import select
from flows.viewer.pages.batch import rows_per_page
from storage.read.frames import Frames
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer.looking import pluck, values

REFUSED = {"type": "rule", "rule": "reward_mean > 0.45"}  # of the first step it is 0.51, of the second 0.44


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A run whose first batch was trained, and whose second one a rule held back, and one with more ranks than work."""
    root = tmp_path_factory.mktemp("batches") / "store"
    packing = {"tokens_per_row": 64, "updates_per_step": 2}
    with pytest.raises(GateRefused):
        rehearse(root, "run", gate=REFUSED, packing=packing | {"data_parallel": 2})
    rehearse(root, "wide", steps=1, packing=packing | {"data_parallel": 8})
    rehearse(root, "paged", packing={"tokens_per_row": 64, "data_parallel": 8})
    return StoreReader.at(root)


def stored(library, table, step, run="run"):
    found = Frames(library.store).run(run)[table].filter(step=step).sort("seq").collect()
    assert len(found), f"there are no {table} to compare with"
    return found.to_dicts()


def test_samples_stand_where_the_borders_say_and_know_their_traces(library):
    of = packed_step(library, "run", 0)
    found = samples(library, of).to_dicts()
    expected = [
        (row["row"], place, row["cu_seqlens"][place], name)
        for row in stored(library, "batches", 0)
        for place, name in enumerate(row["sample_ids"])
    ]
    assert pluck(found, "row", "place", "start", "sample_id") == expected
    for table, name, columns in (
        ("samples", "sample_id", ("advantage", "num_tokens")),
        ("traces", "trace_id", ("key", "example_id")),
    ):
        rows = {row[name]: row for row in stored(library, table, 0)}
        assert pluck(found, *columns) == pluck((rows[row[name]] for row in found), *columns)


def test_a_rows_tokens_and_weights_are_those_it_was_packed_with_and_padding_has_none(library):
    of = packed_step(library, "run", 0)
    row = next(each for each in stored(library, "batches", 0) if len(each["sample_ids"]) > 1)
    query = 'select token_id, advantage, place from batch_tokens where "row" = $row'
    found = select(library.frames("run"), of.lineages, query, row=row["row"])
    spans = [*pairwise(row["cu_seqlens"])]
    places = [place for place, (start, end) in enumerate(spans) for _ in range(start, end)]
    assert found.rows() == [*zip(row["token_ids"], row["advantages"], places, strict=True)]
    sums = row_samples(library, of, row["row"])
    for place, (start, end) in enumerate(spans):
        weights = row["rl_weights"][start:end]
        assert sums["rl_weights"][place] == pytest.approx(sum(weights)) and sum(weights) > 0
        assert sums["num_weighted"][place] == sum(map(bool, weights))
        assert sums["ce_weights"][place] == 0
    of = packed_step(library, "wide", 0)
    number = next(row["row"] for row in stored(library, "batches", 0, "wide") if not row["sample_ids"])
    assert row_samples(library, of, number).is_empty()


def test_a_batch_that_was_not_trained_has_nothing_measured_and_says_who_held_it_back(library):
    trained, held = (packed_step(library, "run", step) for step in (0, 1))
    assert updates(library, trained)["update"].to_list() == [0], "the learner that is played makes one row"
    assert held.updates is None and updates(library, held).is_empty()
    assert [pluck(decisions(library, of), "approved") for of in (trained, held)] == [[True], [False]]


BATCH = "/runs/paged/steps/0/batch"


def test_a_row_has_its_samples_with_the_sums_of_their_weights(library):
    said = values(library, BATCH, row="0")
    (drawn,) = (row for row in said["rows"] if row["row"] == 0)
    assert pluck(said["row"]["samples"], "sample_id") == pluck(drawn["samples"], "sample_id")
    assert all(sample["rl_weights"] > 0 and sample["address"] for sample in said["row"]["samples"])
    assert values(library, BATCH)["row"] is None


def test_a_page_of_a_batch_holds_so_many_samples(library, monkeypatch):
    def per_page(*num_samples):
        return rows_per_page(pl.DataFrame({"num_samples": num_samples}, schema={"num_samples": pl.Int64}))

    assert per_page(0, 0) == per_page(*[20] * 500) == 100
    assert per_page(*[40] * 136) == 50 and per_page(*[5000] * 3) == 1

    whole = values(library, BATCH)["rows"]
    monkeypatch.setattr("flows.viewer.pages.batch.MOST_SAMPLES", 6)
    pages = [values(library, BATCH, page=str(n)) for n in range(values(library, BATCH)["num_pages"])]
    assert len(pages) > 1 and [row for each in pages for row in each["rows"]] == whole

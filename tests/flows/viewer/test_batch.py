"""The packed batch: against the tables themselves, before and after training; and what its pages make of it."""

from typing import Any

import polars as pl
import pytest

from flows.orchestration.states import GateRefused
from flows.queries.batch import decisions, packed_step, row_samples, rows, samples, updates
from flows.queries.store_reader import StoreReader
from flows.queries.views import select_rows
from flows.viewer import addresses
from flows.viewer.pages.batch import rows_per_page
from storage.read.frames import Frames
from tests.fixtures.builders import trace
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer.hand_made import RUN, HandMade, credit, update
from tests.flows.viewer.hand_made import batch as row_of
from tests.flows.viewer.looking import values

REFUSED = {"type": "rule", "rule": "reward_mean > 0.45"}  # of the first step it is 0.51, of the second 0.44


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A run whose first batch was trained, and whose second one a rule held back, and one with more ranks than work."""
    root = tmp_path_factory.mktemp("batches") / "store"
    packing = {"tokens_per_row": 64, "updates_per_step": 2}
    with pytest.raises(GateRefused):
        rehearse(root, "run", gate=REFUSED, packing=packing | {"data_parallel": 2})
    rehearse(root, "wide", steps=1, packing=packing | {"data_parallel": 8})
    return StoreReader.at(root)


def stored(library: StoreReader, table: str, step: int, run: str = "run") -> list[dict[str, Any]]:
    frames = Frames(library.store).run(run)
    found = frames[table].filter(step=step).sort("seq").collect()
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
    assert [(each["row"], each["place"], each["start"], each["sample_id"]) for each in found] == expected
    credits = {row["sample_id"]: row for row in stored(library, "samples", 0)}
    traces = {row["trace_id"]: row for row in stored(library, "traces", 0)}
    for each in found:
        trace = traces[each["trace_id"]]
        assert each["advantage"] == credits[each["sample_id"]]["advantage"]
        assert each["num_tokens"] == credits[each["sample_id"]]["num_tokens"]
        assert (each["key"], each["example_id"]) == (trace["key"], trace["example_id"])


def test_a_rows_tokens_and_weights_are_those_it_was_packed_with_and_padding_has_none(library):
    of = packed_step(library, "run", 0)
    row = next(each for each in stored(library, "batches", 0) if len(each["sample_ids"]) > 1)
    query = 'select token_id, advantage, place from batch_tokens where "row" = $row'
    found = select_rows(library.frames("run"), of.lineages, [row["row"]], query, row=row["row"])
    assert found["token_id"].to_list() == row["token_ids"]
    assert found["advantage"].to_list() == row["advantages"]
    lengths = [b - a for a, b in zip(row["cu_seqlens"], row["cu_seqlens"][1:], strict=False)]
    assert found["place"].to_list() == [place for place, length in enumerate(lengths) for _ in range(length)]
    sums = row_samples(library, of, row["row"])
    for place, (start, length) in enumerate(zip(row["cu_seqlens"], lengths, strict=False)):
        weights = row["rl_weights"][start : start + length]
        assert sums["rl_weights"][place] == pytest.approx(sum(weights)) and sum(weights) > 0
        assert sums["num_weighted"][place] == sum(weight != 0 for weight in weights)
        assert sums["ce_weights"][place] == 0
    of = packed_step(library, "wide", 0)
    number = next(row["row"] for row in stored(library, "batches", 0, "wide") if not row["sample_ids"])
    assert row_samples(library, of, number).is_empty()


def test_of_other_rows_no_token_is_read(library):
    of, query = packed_step(library, "run", 0), 'select distinct "row" from batch_tokens'
    assert select_rows(library.frames("run"), of.lineages, [1], query)["row"].to_list() == [1]


def test_a_batch_that_was_not_trained_has_nothing_measured_and_says_who_held_it_back(library):
    trained, held = (packed_step(library, "run", step) for step in (0, 1))
    assert updates(library, trained)["update"].to_list() == [0], "the learner that is played makes one row"
    assert held.updates is None and updates(library, held).is_empty()
    assert [each["approved"] for each in decisions(library, held)] == [False]
    assert [each["approved"] for each in decisions(library, trained)] == [True]


def test_of_several_packings_the_one_trained_last_counts(tmp_path):
    hand = HandMade(tmp_path / "store")
    sample = credit("t0", 0, (0,), {"rl_weights": [0.0, 1.0], "advantages": [0.0, 0.5]})
    above = hand.step([trace("t0")], [], [sample])
    above = {"advantage": above["advantage"], "rollout": above["rollout"]}
    packings = {
        name: hand.work(f"packing {name}", {"batches": [row_of([sample["sample_id"]])]}, 0, **above) for name in "abc"
    }
    assert packed_step(StoreReader.at(tmp_path / "store"), RUN, 0).batches.key == packings["c"], (
        "none is trained: the last"
    )
    for name in "ab":
        hand.work(f"training {name}", {"updates": [update()]}, packing=packings[name])
    found = packed_step(StoreReader.at(tmp_path / "store"), RUN, 0)
    assert found.batches.key == packings["b"] and found.updates is not None
    assert found.capacity is None and rows(StoreReader.at(tmp_path / "store"), found)["fill"].to_list() == [None]


@pytest.fixture(scope="module")
def paged(tmp_path_factory):
    root = tmp_path_factory.mktemp("pages") / "store"
    rehearse(root, "run", steps=2, packing={"tokens_per_row": 64, "data_parallel": 8})
    return StoreReader.at(root)


BATCH = addresses.batch("run", 0)


def test_a_batch_says_what_was_measured_and_which_policy_came_of_it(paged):
    said = values(paged, addresses.batch("run", 1))
    assert (said["state"], said["policy"]["made"], said["policy"]["from"]) == ("trained", "run:2", "run:1")
    assert (said["previous"], said["next"], said["num_samples"]) == (0, None, 12)
    (update,) = said["updates"]
    assert update["measured"]["loss"] == 0.1, "what the learner that is played says of step 1"
    assert update["rl_tokens"] > 0 and update["ce_tokens"] == 0
    assert said["num_padding"] == sum(not row["samples"] for row in said["rows"])
    assert said["largest"] == max(abs(sample["advantage"]) for row in said["rows"] for sample in row["samples"])


def test_a_row_has_its_samples_with_the_sums_of_their_weights(paged):
    said = values(paged, addresses.row("run", 0, 0).partition("#")[0])
    (drawn,) = (row for row in said["rows"] if row["row"] == 0)
    assert [each["sample_id"] for each in said["row"]["samples"]] == [each["sample_id"] for each in drawn["samples"]]
    assert all(each["rl_weights"] > 0 and each["address"] for each in said["row"]["samples"])
    assert values(paged, BATCH)["row"] is None


def test_a_page_of_a_batch_holds_so_many_samples(paged, monkeypatch):
    def per_page(*num_samples: int) -> int:
        return rows_per_page(pl.DataFrame({"num_samples": num_samples}, schema={"num_samples": pl.Int64}))

    assert per_page(0, 0) == per_page(*[20] * 500) == 100
    assert per_page(*[40] * 136) == 50 and per_page(*[5000] * 3) == 1

    whole = values(paged, BATCH)["rows"]
    monkeypatch.setattr("flows.viewer.pages.batch.MOST_SAMPLES", 6)
    pages = [values(paged, BATCH, page=str(n)) for n in range(values(paged, BATCH)["num_pages"])]
    assert len(pages) > 1 and [row for each in pages for row in each["rows"]] == whole

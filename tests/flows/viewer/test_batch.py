"""The packed batch as the viewer reads it: against the tables themselves, before and after training, row by row."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from flows.orchestration.states import GateRefused
from flows.queries import batch
from flows.queries.batch import decisions, packed, row_samples, rows, samples, updates
from flows.queries.request import NotThere
from flows.queries.store_reader import StoreReader
from storage.read.frames import Frames
from tests.fixtures.builders import trace
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer.hand_made import RUN, HandMade, credit, update
from tests.flows.viewer.hand_made import batch as packed_row

REFUSED = {"type": "rule", "rule": "reward_mean > 0.45"}  # of the first step it is 0.51, of the second 0.44


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    """A run whose first batch was trained, and whose second one a rule held back, and one with more ranks than work."""
    root = tmp_path_factory.mktemp("batches") / "store"
    packing = {"tokens_per_row": 64, "updates_per_step": 2}
    with pytest.raises(GateRefused):
        rehearse(root, "run", gate=REFUSED, packing=packing | {"data_parallel": 2})
    rehearse(root, "wide", steps=1, packing=packing | {"data_parallel": 8})
    return StoreReader.at(root)


def stored(library: StoreReader, table: str, step: int, run: str = "run") -> list[dict[str, Any]]:
    frames = Frames(library.store).run(run)
    found = frames[table].filter(pl.col("step") == step).sort("seq").collect()
    assert len(found), f"there are no {table} to compare with"
    return found.to_dicts()


@pytest.mark.parametrize(("run", "step", "padding"), [("run", 0, False), ("run", 1, False), ("wide", 0, True)])
def test_rows_are_those_of_the_table_and_padding_holds_nothing(
    library: StoreReader, run: str, step: int, padding: bool
) -> None:
    of = packed(library, run, step)
    found = {row["row"]: row for row in rows(library, of).to_dicts()}
    expected = stored(library, "batches", step, run)
    assert list(found) == [row["row"] for row in expected]
    assert any(not row["sample_ids"] for row in expected) == padding
    for row in expected:
        tokens = len(row["token_ids"]) if row["sample_ids"] else 0
        assert found[row["row"]]["num_tokens"] == tokens
        assert found[row["row"]]["num_samples"] == len(row["sample_ids"])
        assert found[row["row"]]["fill"] == pytest.approx(tokens / 64)
        assert (found[row["row"]]["rank"], found[row["row"]]["update"]) == (row["rank"], row["update"])


def test_samples_stand_where_the_borders_say_and_know_their_traces(library: StoreReader) -> None:
    of = packed(library, "run", 0)
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


def test_a_rows_tokens_and_weights_are_those_it_was_packed_with_and_padding_has_none(
    library: StoreReader,
) -> None:
    of = packed(library, "run", 0)
    row = next(each for each in stored(library, "batches", 0) if len(each["sample_ids"]) > 1)
    found = batch.tokens(library, of, row["row"])
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
    of = packed(library, "wide", 0)
    number = next(row["row"] for row in stored(library, "batches", 0, "wide") if not row["sample_ids"])
    assert batch.tokens(library, of, number)["place"].to_list() == [None, None]
    assert row_samples(library, of, number).is_empty()


def test_a_batch_that_was_not_trained_has_nothing_measured_and_says_who_held_it_back(library: StoreReader) -> None:
    trained, held = (packed(library, "run", step) for step in (0, 1))
    assert updates(library, trained)["update"].to_list() == [0], "the learner that is played makes one row"
    assert held.updates is None and updates(library, held).is_empty()
    assert [each["approved"] for each in decisions(library, held)] == [False]
    assert [each["approved"] for each in decisions(library, trained)] == [True]


def test_what_is_not_there_is_named_with_what_is(library: StoreReader) -> None:
    with pytest.raises(NotThere, match="no packed batch of step 7; it has batches of the steps 0-1"):
        packed(library, "run", 7)
    with pytest.raises(NotThere, match="no row 99"):
        batch.tokens(library, packed(library, "run", 0), 99)
    with pytest.raises(NotThere):
        packed(library, "nobody", 0)


def test_of_several_packings_the_one_trained_last_counts(tmp_path: Path) -> None:
    hand = HandMade(tmp_path / "store")
    sample = credit("t0", 0, (0,), {"rl_weights": [0.0, 1.0], "advantages": [0.0, 0.5]})
    above = hand.step([trace("t0")], [], [sample])
    above = {"advantage": above["advantage"], "rollout": above["rollout"]}
    packings = {
        name: hand.work(f"packing {name}", {"batches": [packed_row([sample["sample_id"]])]}, 0, **above)
        for name in "abc"
    }
    assert packed(StoreReader.at(tmp_path / "store"), RUN, 0).batches.key == packings["c"], "none is trained: the last"
    for name in "ab":
        hand.work(f"training {name}", {"updates": [update()]}, packing=packings[name])
    found = packed(StoreReader.at(tmp_path / "store"), RUN, 0)
    assert found.batches.key == packings["b"] and found.updates is not None
    assert found.capacity is None and rows(StoreReader.at(tmp_path / "store"), found)["fill"].to_list() == [None]

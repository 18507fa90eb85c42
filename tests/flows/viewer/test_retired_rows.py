"""Rows that were dropped for their age: pages say so, and what came from them is unknown, not zero and not false."""

import shutil

import pytest

from flows.queries.request import NotThere
from flows.queries.runs import runs
from flows.queries.store_reader import StoreReader
from flows.queries.tokens import tokens
from flows.queries.trace import explain, find_trace
from flows.queries.views import EXPIRED
from flows.viewer.routes import parsed_address
from storage.maintenance.sweep import Retention, expire
from storage.store import open_store
from tests.fixtures import builders
from tests.fixtures.rehearsal import rehearse
from tests.fixtures.step_traces import traces
from tests.flows.viewer.hand_made import FORKED, PATHS, RUN, batch, credit, forked, update
from tests.flows.viewer.looking import answer, everything

TABLES = ("assignments", "traces", "messages", "verdicts", "samples", "batches", "updates")


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """Returns a store of two runs that has lost the rows of a table; of none, where none is named."""
    base = tmp_path_factory.mktemp("retired")
    rehearse(base / "whole", "run", steps=1)
    rehearse(base / "whole", "again", steps=1, training={"learning_rate": 0.5})

    def lacking(table):
        if not (base / f"without-{table}").exists():
            shutil.copytree(base / "whole", base / f"without-{table}")
            if table:
                expire(open_store(base / f"without-{table}"), Retention(table, 0))
        return StoreReader.at(base / f"without-{table}")

    return lacking


@pytest.mark.engine  # every page of a store, seven times
@pytest.mark.parametrize("table", TABLES)
def test_every_page_opens_and_says_which_rows_went(without, table):
    library, told = without(table), {}
    for address in everything(without("")):
        name = parsed_address(address)[0]
        status, text = answer(library, address)
        assert status in (200, 404), address
        if status == 404:
            assert "dropped for their age" in text or name.startswith(("any_trace", "compare")), address
        else:
            told[name] = "rows dropped" in text
    assert told["run"] and told["compare"]
    assert told["step"] == (table != "assignments")
    assert "rows dropped" not in answer(without(""), "/runs/run")[1]


@pytest.mark.parametrize("table", ["verdicts", "samples", "batches"])
def test_nobody_says_that_a_rollout_had_no_weight_whose_batch_cannot_be_read(without, table):
    before, library = traces(without(""), "run", 0), without(table)
    assert set(before["outcome"]) == {"trained"} and before["trained"].all()
    found = traces(library, "run", 0)
    known = table == "verdicts"  # a packed sample was trained on whatever its verdict said
    assert {*found.select("outcome", "trained").rows()} == {("trained", True) if known else (EXPIRED, None)}
    assert len(found) == len(before)
    assert set(library.frames("run")["outcomes"].collect()["outcome"]) == set(found["outcome"])
    (use,) = (use for use in explain(library, "trace-0-0-0")["runs"] if use["run"] == "run")
    assert use["outcome"] == found["outcome"][0]


def test_tokens_of_runs_outlive_the_rows_that_they_were_counted_in(without):
    def counted(table):
        return runs(without(table)).select("tokens_sampled", "tokens_trained", "rewards", "losses").row(0)

    assert counted("")[0] > 0 and counted("")[1] is not None
    assert counted("traces") == counted("updates") == counted("")
    assert counted("metrics")[:2] == (None, None), "unknown is not zero"


def test_a_trace_whose_row_went_is_said_to_be_gone(without):
    with pytest.raises(NotThere, match="dropped for their age"):
        find_trace(without("traces"), "run", "trace-0-0-0")


@pytest.mark.parametrize("table", ["", "samples", "batches", "token_masks", "updates"])
def test_tokens_are_not_called_untrained_or_inside(hand, table):
    credits = [
        credit(FORKED, at, path, {"rl_weights": [0.0] * 3 + [1.0] * (2 + 4 * (at == 0))})
        for at, path in enumerate(PATHS)
    ]
    masks = [{"sample_id": f"{FORKED}/0", "masked": [False] * 4 + [True] * 5}]
    updates = [update(masked_fraction=0.5)]
    hand.step([builders.trace(FORKED)], forked(), credits, batches=[batch(credits)], updates=updates, token_masks=masks)
    if table == "token_masks":  # of which the rows above are left
        (entry,) = hand.store.ledger.entries(stage="training")
        hand.store.slices.expired_slices.record(entry.slices(table), 0)
    elif table:
        expire(hand.store, Retention(table, 0))
    found = tokens(hand.reader, find_trace(hand.reader, RUN, FORKED))
    unknown = table in ("samples", "batches")
    assert set(found["trained"]) == ({None} if unknown else {True, False})
    outside = [{*found.filter(branch=branch)["outside"].drop_nulls()} for branch in (0, 1)]
    unmasked = set() if table in ("samples", "token_masks") else {False}
    assert outside == [set() if table == "samples" else {True, False}, unmasked]

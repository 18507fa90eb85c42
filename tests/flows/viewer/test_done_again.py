"""Work that was removed and done again while somebody looks: its keys are the same, its rows are not."""

import json

import polars as pl
import pytest

from flows.queries.request import plain
from flows.queries.store_reader import StoreReader
from flows.viewer.routes import parsed_address, read_page
from storage.maintenance.plan import plan_removal
from storage.maintenance.sweep import carry_out
from storage.store import open_store
from tests.fixtures import builders, rehearsal
from tests.fixtures.evaluations import HELD_OUT, Sampler, train
from tests.flows.viewer.looking import everything

pytestmark = pytest.mark.engine  # whole runs, and every page three times
EVALUATED = {"num_examples": HELD_OUT, "attempts": 2, "every": 1}


def raised(table, column, more):
    return pl.DataFrame(table).with_columns(pl.col(column) + more).to_arrow().cast(table.schema)


class Luckier(Sampler):
    """Stands in for a model that samples otherwise the second time: every reward is higher."""

    def __call__(self, tables, config, *, step, policy):
        made = super().__call__(tables, config, step=step, policy=policy)
        return made | {"traces": raised(made["traces"], "reward", 0.125)}


def trained_worse(tables, config, *, step, key, policy):
    """Stand in for the training on it: the loss is another too."""
    made = rehearsal.trained(tables, config, step=step, key=key, policy=policy)
    return {"updates": raised(made["updates"], "loss", 7.0)}


def looked_at(library):
    """Return what every page of a store says, as JSON."""
    found = {}
    for address in everything(library):
        name, question = parsed_address(address)
        found[address] = json.dumps(plain(read_page(name, library.still(), question).values), default=str)
    return found


@pytest.mark.nightly
def test_pages_tell_the_rows_that_are_there_now(tmp_path, monkeypatch):
    root = tmp_path / "store"
    train(root, "run", Sampler(), steps=1, evaluation=EVALUATED)
    train(root, "other", Sampler(), steps=1, seed=8, evaluation=EVALUATED)
    held = StoreReader.at(root)
    before, keys = looked_at(held), set(held.graph.works)
    store = open_store(root)
    carry_out(store, plan_removal(store, keep=[], force=["run", "other"]))
    training = builders.stand_in(rehearsal.STAND_INS["training"], trained_worse)
    monkeypatch.setitem(rehearsal.STAND_INS, "training", training)
    train(root, "run", Luckier(), steps=1, evaluation=EVALUATED)
    train(root, "other", Luckier(), steps=1, seed=8, evaluation=EVALUATED)
    fresh = looked_at(StoreReader.at(root))
    assert set(held.graph.works) == keys and set(before) == set(fresh)
    same = {address for address in fresh if fresh[address] == before[address]}
    assert same == {"/runs/run/changes", "/runs/other/changes"}, "all but phrases of replies tell of rewards"
    now = looked_at(held)
    assert [address for address in fresh if now[address] != fresh[address]] == []

"""Work that was removed and done again while somebody looks: its keys are the same, its rows are not."""

import json
from functools import wraps

import polars as pl
import pytest

from flows.queries.request import plain
from flows.queries.store_reader import StoreReader
from flows.viewer.routes import parsed_address, read_page
from storage.maintenance.plan import plan_removal
from storage.maintenance.sweep import carry_out
from storage.store import open_store
from tests.fixtures import rehearsal
from tests.flows.viewer.looking import everything

pytestmark = pytest.mark.engine  # whole runs, and every page three times


def raised(function, table, column):
    """Return a stage's function with a column of one table raised."""

    @wraps(function)
    def again(*given, **named):
        tables = function(*given, **named)
        rows = pl.DataFrame(tables[table]).with_columns(pl.col(column) + 0.125).to_arrow().cast(tables[table].schema)
        return tables | {table: rows}

    return again


def looked_at(library):
    """Return what every page of a store says, as JSON."""
    found = {}
    for address in everything(library):
        name, question = parsed_address(address)
        found[address] = json.dumps(plain(read_page(name, library.still(), question).values), default=str)
    return found


@pytest.mark.nightly
def test_pages_tell_the_rows_that_are_there_now(tmp_path):
    store = rehearsal.rehearse(tmp_path, "run", steps=1)
    held = StoreReader.at(tmp_path)
    before, keys = looked_at(held), set(held.graph.works)
    carry_out(store, plan_removal(store, keep=[], force=["run"]))
    luckier, worse = (raised(rehearsal.sampled, "traces", "reward"), raised(rehearsal.trained, "updates", "loss"))
    with rehearsal.play_stages(rollout=luckier, training=worse):
        rehearsal.rehearse(tmp_path, "run", steps=1)
    fresh = looked_at(StoreReader(open_store(tmp_path)))
    assert set(held.graph.works) == keys and set(before) == set(fresh)
    assert {address for address in fresh if fresh[address] == before[address]} == {"/runs/run/changes"}
    assert looked_at(held) == fresh

"""The graph of keys against plain sets, and which work counts where parts, branches and repetitions are."""

from dataclasses import replace
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from storage.read.lineage import Graph
from storage.refs import Slice
from tests.fixtures.rows import MOMENT, entry


def piece(table, run="run", attempt="attempt", rows=1):
    return Slice(table, run, attempt, rows, "digest", ())


def work(key, *inputs, run="run", tables=(), **others):
    """A ledger row with inputs, and with a slice of each table."""
    made = entry(key, run, outputs=tuple(piece(table) for table in tables))
    return replace(made, inputs={f"input {name}": name for name in inputs}, **others)


@st.composite
def graphs(draw):
    """Inputs by key: of earlier keys, and now and then a digest that is no key."""
    keys = [f"k{number}" for number in range(draw(st.integers(1, 9)))]
    return {
        key: draw(st.lists(st.sampled_from([*keys[:number], "digest of a file"]), unique=True))
        for number, key in enumerate(keys)
    }


@given(graphs())
def test_ancestors_are_what_the_inputs_reach_and_descendants_are_the_same_backwards(
    inputs,
):
    above = {}
    for key, names in inputs.items():
        known = {name for name in names if name in inputs}
        above[key] = known.union(*(above[name] for name in known))
    graph = Graph([work(key, *names) for key, names in inputs.items()])
    for key in inputs:
        assert {each.key for each in graph.ancestors(key)} == above[key]
        assert {each.key for each in graph.descendants(key)} == {other for other in inputs if key in above[other]}
        assert len(graph.ancestors(key)) == len(above[key])


def test_shared_work_is_one_node_of_several_runs():
    mine = work("k", run="mine", tables=("traces",), finished_at=MOMENT + timedelta(seconds=1))
    theirs = work("k", run="theirs", tables=("traces",))
    only = work("only", "k", run="mine")
    graph = Graph([mine, theirs, only])
    assert graph.works["k"].runs == ("mine", "theirs")
    assert graph.works["k"].entry == theirs, "the earliest row tells who was first"
    assert [each.key for each in graph.children("k")] == ["only"]
    assert graph.of_run("theirs").children("k") == [] and list(graph.of_run("theirs").works) == ["k"]
    assert [each.key for each in graph.of_run("mine").children("k")] == ["only"]


def test_parts_count_until_the_whole_is_there():
    parts = [replace(entry("k", part=name, outputs=(piece("traces", attempt=name),)), attempt=name) for name in "ba"]
    unfinished = Graph(parts).works["k"]
    assert not unfinished.finished and [each.attempt for each in unfinished.slices] == ["a", "b"]
    whole = replace(entry("k", outputs=(piece("traces", attempt="a"),)), attempt="whole")
    finished = Graph([*parts, whole]).works["k"]
    assert finished.finished and [each.attempt for each in finished.slices] == ["a"]

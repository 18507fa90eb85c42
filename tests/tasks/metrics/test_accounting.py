"""Accounting: every rollout of a step through the real stages, and what happens when one is lost or doubled."""

import pytest

from tasks.metrics.accounting import AccountBreach, account
from tasks.packing.stage import STAGE as PACKING
from tests.fixtures.builders import assignment, exchanges, failed, table, trace, view
from tests.fixtures.stages import packing, through_advantage, written

TRACES = [
    trace("a"),
    trace("b", reward=0.0),
    failed("c"),
    failed("d", error_class="infrastructure"),
    trace("e", is_truncated=True, num_output_tokens=9),
    trace("f", group_id="g1"),
    trace("g", group_id="g1", reward=None),
    trace("h", group_id="g2", trainable=False, agent="judge"),
    trace("i", reward=0.25),
]


def sampled(traces, assigned):
    """Return the tables of a step whose rollouts have ended."""
    return {
        "assignments": table("assignments", [assignment(row) for row in assigned]),
        "traces": table("traces", traces),
        "messages": table("messages", exchanges(traces)),
    }


@pytest.fixture(scope="module")
def step():
    """All tables of one step."""
    filters = [{"type": "truncated", "enforce": True}, {"type": "zero_advantage"}]
    return packed(sampled(TRACES, TRACES), {"i": "a broken verifier"}, filtering={"filters": filters})


def packed(tables, quarantined=None, **sections):
    """The tables of a step up to its batches."""
    tables = through_advantage(tables, quarantined, **sections)
    return tables | written(packing(tables, view(PACKING)))


def shares(tables):
    return account(*(tables[name] for name in ("assignments", "traces", "verdicts", "samples", "batches")))


def test_every_rollout_has_one_outcome(step):
    assert shares(step) == {
        ("errored", "infrastructure"): 1,
        ("errored", "timeout"): 1,
        ("filtered", "truncated"): 1,
        ("filtered", "untrainable"): 1,
        ("filtered", "zero_advantage"): 1,
        ("no weight", ""): 1,
        ("quarantined", ""): 1,
        ("trained", ""): 2,
    }


def doubled(rows):
    return rows.take([*range(rows.num_rows), 0])


def swapped(rows, column, value):
    """The rows with `value` in the first row of a column."""
    place = rows.schema.get_field_index(column)
    return rows.set_column(place, rows.schema.field(place), [[value, *rows[column].to_pylist()[1:]]])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("traces", lambda rows: rows.slice(1), "1 assignments left no trace, first g0/a"),
        ("assignments", lambda rows: rows.slice(1), "g0/a was never assigned"),
        ("assignments", doubled, "assignment g0/a is there 2 times"),
        ("traces", doubled, "trace a is there 2 times"),
        (
            "traces",
            lambda rows: swapped(doubled(rows), "trace_id", "z"),
            "1 traces lack a verdict, or verdicts a trace, first z",
        ),
        (
            "traces",
            lambda rows: swapped(swapped(doubled(rows), "trace_id", "z"), "episode_id", "z"),
            "own episode g0/a is there 2 times",
        ),
        ("verdicts", lambda rows: rows.slice(1), "1 traces lack a verdict, or verdicts a trace, first a"),
        ("verdicts", doubled, "trace a is there 2 times"),
        ("verdicts", lambda rows: swapped(rows, "reason", "truncated"), "trace a is trained although it was not kept"),
        ("traces", lambda rows: swapped(rows, "error_class", "timeout"), "trace a is trained although it was not kept"),
        ("samples", lambda rows: rows.slice(1), "sample a/0 is packed but is not in table samples"),
        ("samples", lambda rows: swapped(rows, "trace_id", "z"), "trace z is trained but is not in table traces"),
        ("batches", doubled, "is there 2 times"),
    ],
)
def test_a_rollout_lost_or_doubled_is_a_breach(step, name, change, message):
    with pytest.raises(AccountBreach, match=message):
        shares(step | {name: change(step[name])})


def test_an_agent_may_play_several_times_in_an_episode():
    """Solvers of one proposed problem share a seat: each of their traces has its own outcome."""
    played = {"episode_id": "e", "assignment_id": "g0/e"}
    seats = (("p", "proposer", 1.0), ("s", "solver", 1.0), ("t", "solver", 0.0), ("u", "solver", None))
    traces = [trace(name, agent=agent, reward=reward, **played) for name, agent, reward in seats]
    sections = {"filtering": {"filters": [{"type": "errored"}]}, "algorithm": {"type": "hierarchical_grpo"}}
    counts = shares(packed(sampled(traces, traces[:1]), **sections))
    assert counts == {("no weight", ""): 2, ("trained", ""): 2}


def test_a_step_that_trains_nothing_is_accounted_for(step):
    empty = {name: step[name].slice(0, 0) for name in ("samples", "batches")}
    counts = {(outcome, count) for (outcome, _), count in shares(step | empty).items()}
    assert counts == {("filtered", 1), ("errored", 1), ("quarantined", 1), ("no weight", 3)}

"""Difficulties: what is known of examples after a step, and that nothing is made up where it is lost."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.environments import SeatRule
from storage.schemas.stage_tables import DIFFICULTIES
from storage.schemas.validation import RowPlace, check_rows
from tasks.assignment.samplers.sampler import (
    DifficultiesMissing,
    known_difficulties,
    rewards_by_environment,
    update_difficulties,
)
from tests.fixtures.builders import failed, table, trace

EMPTY = DIFFICULTIES.arrow.empty_table()


def row(example, reward, num_groups=1, environment="reverse"):
    return {"environment": environment, "example_id": example, "reward": reward, "num_groups": num_groups}


def tried(example, rewards, group, **others):
    return [
        trace(f"{group}/{n}", group_id=group, example_id=example, reward=reward, **others)
        for n, reward in enumerate(rewards)
    ]


def after(before, *traces):
    found = update_difficulties(before, table("traces", [one for group in traces for one in group]))
    check_rows(found, DIFFICULTIES, RowPlace("difficulties"))
    return found.to_pylist()


def test_a_group_counts_by_its_mean_and_replaces_the_one_before():
    first = after(EMPTY, tried("b", [0.0, 1.0], "0-0"), tried("a", [1.0], "0-1"))
    assert first == [row("a", 1.0), row("b", 0.5)]
    again = after(table("difficulties", first), tried("b", [1.0, 1.0], "1-0"))
    assert again == [row("a", 1.0), row("b", 1.0, 2)]


def test_of_several_groups_of_a_step_the_last_by_number_counts():
    groups = tried("a", [0.0], "0-10"), tried("a", [1.0], "0-9"), tried("a", [0.5], "0.1-0")
    assert after(EMPTY, *groups) == [row("a", 0.5, 3)]
    assert after(EMPTY, *groups[:2]) == [row("a", 0.0, 2)]


def test_only_trainable_traces_that_did_not_fail_and_were_scored_count():
    odd = [
        failed("f", group_id="0-0", example_id="a", reward=0.0),
        trace("n", group_id="0-0", example_id="a", reward=None),
        trace("j", group_id="0-0", example_id="a", reward=0.0, trainable=False),
        trace("k", group_id="0-0", example_id="a", reward=0.0, agent="judge"),
    ]
    assert after(EMPTY, tried("a", [1.0, 0.5], "0-0"), odd) == [row("a", 0.75)]
    assert after(EMPTY, odd) == []


def test_where_one_seat_learns_its_reward_alone_says_how_hard_an_example_was():
    info = '{"learner_seat": "for"}'
    rows = [
        *tried("a", [1.0, -1.0, 1.0], "0-0", agent="for", info=info),
        *(trace(f"x{n}", group_id="0-0", example_id="a", reward=-1.0, agent="against", info=info) for n in range(3)),
    ]
    rules = {"reverse": SeatRule(learner_seat=True)}
    assert update_difficulties(EMPTY, table("traces", rows), rules).to_pylist() == [row("a", 1 / 3)]
    assert after(EMPTY, rows) == [row("a", -1 / 3)], "of all seats, where all are trained"


def test_environments_do_not_share_an_example():
    found = after(EMPTY, tried("a", [1.0], "0-0"), tried("a", [0.0], "0-1", environment="sums"))
    assert found == [row("a", 1.0), row("a", 0.0, environment="sums")]
    assert rewards_by_environment(table("difficulties", found)) == {"reverse": {"a": 1.0}, "sums": {"a": 0.0}}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.floats(0, 1)), max_size=12), st.randoms())
def test_it_does_not_matter_which_rollout_finished_first(made, chance):
    rows = [
        trace(f"t{n}", group_id=f"0-{'abc'.index(example) * 4 + group}", example_id=example, reward=reward)
        for n, (example, group, reward) in enumerate(made)
    ]
    shuffled = list(rows)
    chance.shuffle(shuffled)
    assert after(EMPTY, rows) == after(EMPTY, shuffled)


def test_nothing_is_known_at_the_start_and_it_must_be_known_later():
    assert known_difficulties({}, 0, 0).equals(EMPTY)
    for step, batch in ((1, 0), (0, 1)):
        with pytest.raises(DifficultiesMissing, match=f"before step {step}, batch {batch}.*cold start"):
            known_difficulties({}, step, batch)
    before = table("difficulties", [row("a", 1.0)])
    assert known_difficulties({"difficulties": before}, 0, 1) is before
    traces: pa.Table = table("traces", tried("a", [0.0], "0-0"))
    assert known_difficulties({"difficulties": before, "traces": traces}, 1, 0).to_pylist() == [row("a", 0.0, 2)]

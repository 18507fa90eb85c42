"""Samplers: which examples a batch of a step tries, by hand and as laws; what is known of examples after a step."""

from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.environments import SeatRule
from configs.sections import AssignmentConfig, DifficultyPoolsSampler, StandardSampler
from storage.schemas.contract import RowPlace, check_rows
from storage.schemas.stage_tables import DIFFICULTIES
from tasks.arrays.permutation import digest
from tasks.assignment.samplers import SAMPLERS
from tasks.assignment.samplers.difficulty_pools import weight_of
from tasks.assignment.samplers.sampler import (
    DifficultiesMissing,
    SampleRequest,
    known_difficulties,
    rewards_by_environment,
    update_difficulties,
)
from tests.fixtures.builders import failed, table, trace

POOLS = DifficultyPoolsSampler()
HARD, NORMAL, EASY = 0.2, 1.0, 0.2


def asked(count, turns, *, step=0, batch=0, taken=(), difficulties=None, seed=7):
    examples = [f"e{n}" for n in range(count)]
    return SampleRequest("reverse", examples, turns, seed, step, batch, frozenset(taken), difficulties or {})


def standard(wanted, shuffle=True):
    return SAMPLERS["standard"](wanted, AssignmentConfig(shuffle=shuffle), StandardSampler())


def pools(wanted):
    return SAMPLERS["difficulty_pools"](wanted, AssignmentConfig(), POOLS)


@pytest.mark.parametrize(
    ("reward", "weight"),
    [(None, 1.0), (-1.0, HARD), (0.0, HARD), (0.25, HARD), (0.26, NORMAL), (0.75, NORMAL), (0.76, EASY), (9.0, EASY)],
)
def test_the_pool_of_an_example_follows_from_its_last_reward(reward, weight):
    assert weight_of(reward, POOLS) == weight


def test_an_example_that_was_not_tried_yet_has_a_weight_of_its_own():
    assert weight_of(None, DifficultyPoolsSampler(unseen_weight=3.0)) == 3.0


def test_the_smallest_times_come_first_by_hand():
    rewards = {"e0": 0.0, "e1": 0.5, "e2": 1.0}
    weights = {"e0": HARD, "e1": NORMAL, "e2": EASY, "e3": 1.0}

    def time(example):
        number = digest("pool", 7, "reverse", 4, 1, 0, example)
        return -log((number // 2**11 + 0.5) / 2**53) / weights[example]

    expected = sorted(weights, key=time)
    assert pools(asked(4, range(4), step=4, batch=1, difficulties=rewards)) == expected


@settings(max_examples=30)
@given(count=st.integers(1, 9), wanted=st.integers(0, 20), step=st.integers(0, 5), data=st.data())
def test_no_example_comes_again_before_all_have_come(count, wanted, step, data):
    taken = data.draw(st.sets(st.integers(0, count - 1)).map(lambda numbers: {f"e{n}" for n in numbers}))
    found = pools(asked(count, range(wanted), step=step, batch=1, taken=taken))
    for start in range(0, wanted, count):
        epoch = found[start : start + count]
        assert len(set(epoch)) == len(epoch)
        fresh = [example not in taken for example in epoch]
        assert fresh == sorted(fresh, reverse=True), "those of earlier batches come last"


def test_a_further_batch_in_dataset_order_goes_on_where_the_step_ended():
    assert standard(asked(5, [3, 4, 5]), shuffle=False) == ["e3", "e4", "e0"]
    assert standard(asked(5, [3, 4], batch=1, taken={"e3", "e4", "e0"}), shuffle=False) == ["e1", "e2"]
    assert standard(asked(3, [0, 1], batch=1, taken={"e0", "e1", "e2"}), shuffle=False) == ["e0", "e1"]


@settings(max_examples=30)
@given(count=st.integers(1, 9), turns=st.lists(st.integers(0, 30), max_size=9), data=st.data())
def test_examples_of_earlier_batches_come_only_when_there_is_no_other(count, turns, data):
    taken = data.draw(st.sets(st.integers(0, count - 1), min_size=1).map(lambda numbers: {f"e{n}" for n in numbers}))
    found = standard(asked(count, turns, batch=1, taken=taken))
    fresh = [example for example in found if example not in taken]
    assert len(fresh[: count - len(taken)]) == min(len(turns), count - len(taken)) == len(set(fresh))


def test_a_batch_without_earlier_ones_is_the_walk_as_it_was():
    assert standard(asked(4, range(8))) == ["e2", "e0", "e3", "e1", "e3", "e1", "e2", "e0"]


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
    assert known_difficulties(None, None, 0, 0).equals(EMPTY)
    for step, batch in ((1, 0), (0, 1)):
        with pytest.raises(DifficultiesMissing, match=f"before step {step}, batch {batch}.*cold start"):
            known_difficulties(None, None, step, batch)
    before = table("difficulties", [row("a", 1.0)])
    assert known_difficulties(before, None, 0, 1) is before
    traces = table("traces", tried("a", [0.0], "0-0"))
    assert known_difficulties(before, traces, 1, 0).to_pylist() == [row("a", 0.0, 2)]

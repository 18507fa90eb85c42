"""Bins: no row over budget, no sample lost, rows full, ranks even."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.learner.prefixes import shared_prefixes
from tasks.packing.bin_packing import (
    CROSSOVER_TOKENS,
    Prompts,
    balanced_rows,
    best_fit,
    estimated_costs,
    longest_first,
    pack,
    pack_by_prompt,
)

CAPACITY = 64
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=80)


def lognormal(count, mean=600.0, sigma=0.9, longest=4096, seed=0):
    """Lengths as rollouts have them: most short, a few near the limit."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn, 16, longest).astype(int).tolist()


def check(rows, lengths, capacity):
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(sum(lengths[sample] for sample in row) <= capacity for row in rows)


def idle_share(rows, lengths, num_ranks):
    """Share of the ranks' time spent waiting for the slowest row of each micro-step."""
    costs = estimated_costs(lengths)
    by_step = np.array([costs[row].sum() for row in rows]).reshape(-1, num_ranks)
    return 1 - by_step.sum() / (by_step.max(axis=1).sum() * num_ranks)


def test_best_fit_by_hand():
    # 5 and 3 fill a row; 4 opens the next; 2 fits it; the last 2 still does.
    assert best_fit([2, 5, 4, 3, 2], 8) == [[1, 3], [2, 0, 4]]
    assert best_fit([], 8) == []
    assert best_fit([8, 8], 8) == [[0], [1]]


def test_best_fit_takes_the_tightest_row():
    # After 7 and 6 there is room for 3 and 4: the 3 goes where nothing is left over.
    assert best_fit([7, 6, 3], 10) == [[0, 2], [1]]


def test_costs_are_linear_then_quadratic():
    assert estimated_costs([CROSSOVER_TOKENS]).tolist() == [2 * CROSSOVER_TOKENS]
    assert estimated_costs([10, 0])[1] == 0 and estimated_costs([10])[0] < 10.01


@given(lengths=LENGTHS, num_ranks=st.integers(1, 9), num_groups=st.integers(1, 9))
def test_pack_places_every_sample_once_in_a_multiple_of_the_ranks(lengths, num_ranks, num_groups):
    samples = np.arange(len(lengths))
    alone, alike = (Prompts(numbers, np.array(lengths) // 2) for numbers in (samples, samples % num_groups))
    by_prompt = pack_by_prompt(lengths, CAPACITY, num_ranks, alike)
    for rows, prompts in ((pack(lengths, CAPACITY, num_ranks), alone), (by_prompt, alike)):
        check(rows, lengths, CAPACITY)
        assert len(rows) % num_ranks == 0
        assert (np.diff(prompts.row_costs(lengths, rows)) < 1e-9).all()


@given(lengths=LENGTHS, num_ranks=st.integers(2, 9))
def test_balanced_needs_hardly_more_rows_than_best_fit(lengths, num_ranks):
    fewest = -(-len(best_fit(lengths, CAPACITY)) // num_ranks) * num_ranks
    rows = balanced_rows(lengths, CAPACITY, num_ranks, estimated_costs(lengths))
    assert len(rows) - fewest in (0, num_ranks, 2 * num_ranks)


def test_balanced_takes_more_rows_where_even_ones_would_overflow():
    # Best-fit fills three rows of 9. Evenly filled, they hold 8 each before the last 3, which then fits nowhere.
    lengths = [5, 5, 4, 4, 3, 3, 3]
    assert best_fit(lengths, 9) == [[0, 2], [1, 3], [4, 5, 6]]
    rows = balanced_rows(lengths, 9, 3, estimated_costs(lengths))
    check(rows, lengths, 9)
    assert rows == [[0], [1], [2], [3], [4, 6], [5]]


def test_ranks_wait_less_than_with_rows_that_are_only_full():
    lengths = lognormal(512)
    even, full = pack(lengths, 4096, 8), best_fit(lengths, 4096)
    full += [[] for _ in range(-len(full) % 8)]
    assert idle_share(even, lengths, 8) < 0.02 < idle_share(full, lengths, 8)


def test_rows_are_even_by_cost_and_not_by_tokens():
    # 54,000 tokens in one sample cost 108,000, in two 81,000: the last goes beside the two, though tokens are equal.
    lengths = [CROSSOVER_TOKENS, CROSSOVER_TOKENS // 2, CROSSOVER_TOKENS // 2, 10_000]
    assert balanced_rows(lengths, 2 * CROSSOVER_TOKENS, 2, estimated_costs(lengths)) == [[0], [1, 2, 3]]
    # The row of one is the costlier, with fewer tokens, and comes first.
    assert pack(lengths, 2 * CROSSOVER_TOKENS, 2) == [[0], [1, 2, 3]]
    assert pack([20_000] * 3 + [CROSSOVER_TOKENS], 60_000, 1) == [[3], [0, 1, 2]]


def test_one_rank_and_many_samples_have_full_rows_and_others_even_ones(monkeypatch):
    monkeypatch.setattr("tasks.packing.bin_packing.MOST_BALANCED_SAMPLES", 4)
    assert pack([2] * 4, 10, 1) == [[0, 1, 2, 3]]
    assert pack([2] * 4, 10, 2) == [[0, 2], [1, 3]]
    assert pack([2] * 5, 10, 3) == [[0, 1, 2, 3, 4], [], []]


def test_rows_of_equal_cost_stay_in_order():
    order = [*range(0, 80, 2), *range(1, 80, 2)]
    assert longest_first([10, 9] * 40) == order and pack([10, 9] * 40, 10, 1) == [[sample] for sample in order]


def test_fewer_samples_than_ranks_leave_empty_rows_at_the_end():
    assert pack([5, 9], 16, 4) == [[1], [0], [], []]


def test_a_row_costs_each_prompt_once():
    prompts = Prompts(np.array([0, 0, 1]), np.array([4, 4, 2]))
    assert prompts.row_costs([5, 6, 7], [[0, 2, 1], [], [1]]) == pytest.approx([5 + 6 - 4 + 7, 0, 6], abs=0.01)


@pytest.mark.parametrize(("capacity", "num_ranks", "share"), [(8192, 1, 0.61), (8192, 8, 0.62), (16384, 4, 0.58)])
def test_prompts_are_seldom_computed_again_and_ranks_are_done_sooner(capacity, num_ranks, share):
    chance = np.random.default_rng(0)
    groups = chance.permutation(np.repeat(np.arange(32), chance.integers(8, 17, 32)))
    prompts = Prompts(groups, chance.integers(200, 1001, 32)[groups])
    lengths = (prompts.tokens + chance.integers(20, 1001, len(groups))).tolist()

    def computed(row):
        tokens = [np.repeat([groups[one], 99 + one], [size := prompts.tokens[one], lengths[one] - size]) for one in row]
        once = shared_prefixes(np.concatenate(tokens), np.cumsum([0, *map(len, tokens)])) if row else None
        return len(once.computed) if once else sum(map(len, tokens))

    batches = pack_by_prompt(lengths, capacity, num_ranks, prompts), pack(lengths, capacity, num_ranks)
    together, scattered = (sum(sorted(map(computed, rows))[::-num_ranks]) for rows in batches)
    assert together < share * scattered and len(batches[0]) <= 1.15 * len(batches[1])

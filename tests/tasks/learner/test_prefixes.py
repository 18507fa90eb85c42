"""What segments of a row have in common is computed once, and changes neither log-probs nor gradients."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.learner.model import run_row
from tasks.learner.prefixes import WORTH, shared_prefixes
from tasks.learner.speed import training_cost
from tests.fixtures.packed import Sample, row_of, sample
from tests.fixtures.policies import CPU, assert_near, flat_gradient, policy_of

pytestmark = [pytest.mark.engine, pytest.mark.essential]


def begun_alike(sample_id, prompt, length, seed):
    """Return a random sample with a prompt, which has no weight."""
    made = sample(sample_id, length, seed)
    size = min(len(prompt), length // 2)
    return Sample(sample_id, prompt[:size] + made.token_ids[size:], made.streams)


PROMPT, OTHER = list(range(40, 52)), list(range(40, 44)) + [7] * 9
SAMPLES = [
    *(begun_alike(f"a{number}", PROMPT, 24 + number, number) for number in range(4)),
    *(begun_alike(f"b{number}", OTHER, 26, 9 + number) for number in range(3)),
    sample("alone", 11, 5),
    begun_alike("a again", PROMPT, 24, 0),  # the tokens of the first one
]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=9))
def test_what_stands_for_a_token_has_the_same_tokens_before_it(segments):
    """And nothing is computed twice but the last tokens of segments."""
    token_ids, borders = np.concatenate(segments), [0, *np.cumsum([len(each) for each in segments]).tolist()]
    seen = [tuple(segment[: place + 1]) for segment in segments for place in range(len(segment))]
    last = [end - 1 for end in borders[1:]]
    needed = len(last) + len({*seen} - {seen[token] for token in last})
    found = shared_prefixes(token_ids, borders)
    assert (found is None) == (WORTH * (len(seen) - needed) < len(seen))
    if found is None:
        return
    assert len(found.computed) == needed
    assert [seen[token] for token in found.computed[found.places]] == seen
    assert found.places[found.computed].tolist() == list(range(needed))
    for end, (first, stop) in zip(borders[1:], pairwise(found.borders), strict=True):
        assert stop > first and found.computed[first:stop].tolist() == list(range(end - (stop - first), end))


def test_little_is_not_shared():
    alike = np.array([*range(10), *range(100, 130), *range(10), *range(200, 230)])
    assert shared_prefixes(alike, (0, 40, 80)).borders == (0, 40, 70)
    assert shared_prefixes(np.append(alike, 0), (0, 40, 81)) is None


def measured(policy, row, shares):
    policy.shares_prefixes = shares
    policy.zero_grad()
    logprobs, entropies = run_row(policy, row, CPU)
    (logprobs * torch.tensor(row.streams["advantages"][row.weighted]) + 0.3 * entropies).sum().backward()
    values = torch.stack([logprobs, entropies]).detach()
    return values, flat_gradient(policy)


def assert_the_same_without(policy, row):
    (values, gradient), (expected, expected_gradient) = (measured(policy, row, shares) for shares in (True, False))
    assert_near(values, expected, 1e-11)
    # The model's norms round gradients to float32, of a shared token once and else one for each segment.
    assert_near(gradient, expected_gradient, 1e-6 * float(expected_gradient.abs().max()))


def test_values_and_gradients_are_those_of_all_tokens(exact_policy, kernel):
    row = row_of(SAMPLES)
    assert len(row.shared.computed) < 0.75 * row.num_tokens
    assert_the_same_without(exact_policy, row)


def test_tokens_with_weight_are_shared_as_well(exact_policy, kernel):
    """Branches of a trace begin with turns that were sampled, and each trains on them."""
    begun = sample("long", 30, 1)
    branches = [begun_alike(f"branch {number}", begun.token_ids[:20], 40, 3 + number) for number in range(3)]
    row = row_of([begun, *branches])
    assert (row.weighted[:15] < 30).all() and row.shared.places[30 + 15] == row.shared.places[15]
    assert_the_same_without(exact_policy, row)


def test_gradients_do_not_ask_which_samples_share_a_row(exact_policy, kernel):
    together, scattered = (SAMPLES[:4], SAMPLES[4:8]), (SAMPLES[:8:2], SAMPLES[1:8:2])
    gradients = [sum(measured(exact_policy, row_of(row), True)[1] for row in rows) for rows in (together, scattered)]
    computed = [sum(row_of(row).once[-1] for row in rows) for rows in (together, scattered)]
    assert computed[0] < computed[1]
    assert_near(*gradients, 1e-6 * float(gradients[1].abs().max()))


@pytest.mark.parametrize("shares", [True, False])
def test_the_setting_says_whether_they_are_shared(world, model_directory, shares):
    policy, row, seen = policy_of(model_directory, shared_prefixes=shares), row_of(SAMPLES), []
    policy.causal.get_decoder().layers[0].register_forward_pre_hook(lambda layer, args: seen.append(args[0].shape[1]))
    run_row(policy, row, CPU)
    assert seen == [len(row.shared.computed) if shares else row.num_tokens]
    cost = training_cost(policy)
    pairs = np.diff(row.borders) ** 2
    left_out = (np.diff(row.borders) - np.diff(row.shared.borders)) ** 2 if shares else 0 * pairs
    assert (
        cost.of([row]) == cost.token * seen[0] + cost.pair * (pairs - left_out).sum() + cost.weighted * row.num_weighted
    )

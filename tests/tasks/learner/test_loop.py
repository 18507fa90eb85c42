"""The gradient of a batch does not depend on how samples fall on rows, micro-steps or padding."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.losses import CispoLoss, DppoLoss, GspoLoss, IpoLoss, PpoLoss, SequenceMask, TruncatedImportance
from tasks.learner import loop
from tasks.learner.distributed import ALONE, World
from tasks.learner.loop import _largest, accumulate_gradients
from tasks.learner.loss import Objective
from tasks.learner.optimizer import clip_gradients
from tests.fixtures.output_head import Counted
from tests.fixtures.packed import all_rows, batch_of, padding, sample
from tests.fixtures.policies import CPU, assert_near, flat_gradient

pytestmark = [pytest.mark.engine, pytest.mark.essential]

SAMPLES = [
    sample("a", 9, 1),
    sample("b", 5, 2, "ce"),
    sample("c", 12, 3),
    sample("d", 7, 4, "ref_kl"),
    sample("e", 3, 5),
]
APART = [[each] for each in SAMPLES]
ANY_ORDER = [f"aten::{name}" for name in ("cumsum", "nll_loss_forward", "put_", "histc", "bincount", "median")]
"""Operations without a kernel for CUDA that adds up in a fixed order, by the page of `use_deterministic_algorithms`."""


def gradient(policy, rows, config=None):
    """Return the flat gradient, what was measured and the statistics by sample."""
    policy.zero_grad()
    statistics, objective = [], Objective(config or DppoLoss())
    totals = accumulate_gradients(policy, batch_of(rows), objective, ALONE, CPU, take=statistics.extend)
    by_sample = {}
    for entry in statistics:
        for name, start, end in zip(entry.row.sample_ids, entry.row.borders, entry.row.borders[1:], strict=False):
            by_sample[name] = (entry.logprobs[start:end], entry.entropies[start:end])
    return flat_gradient(policy), totals, by_sample


def assert_same(one, other):
    scale = one[0].abs().max()
    assert scale > 1e-3
    assert_near(one[0] / scale, other[0] / scale, 1e-11)
    assert one[1].sums == pytest.approx(other[1].sums, rel=1e-11, abs=1e-13)
    assert one[1].maxima == pytest.approx(other[1].maxima, rel=1e-11)
    assert one[2].keys() == other[2].keys()
    for name in one[2]:
        for mine, theirs in zip(one[2][name], other[2][name], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def split(exact_policy):
    """The gradient with every sample in a row of its own."""
    return gradient(exact_policy, APART)


LOSSES = [
    IpoLoss(threshold=0.001),
    PpoLoss(clip_low=0.1, clip_high=0.1),
    CispoLoss(clip_low=0.5, clip_high=0.5),
    GspoLoss(clip_low=0.02, clip_high=0.02),
    PpoLoss(tis=TruncatedImportance(level="sequence", cap=1.1), sequence_mask=SequenceMask(low=0.6, high=1.5)),
    DppoLoss(sequence_mask=SequenceMask(ratio="extremes", low=0.5, high=2.0)),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_and_padding_do_not_matter_to_any_loss(exact_policy, loss):
    alone = gradient(exact_policy, APART, loss)
    together = gradient(exact_policy, [[padding(2)], SAMPLES[3:], [padding(9)], SAMPLES[2::-1]], loss)
    assert_same(alone, together)
    assert alone[1].sums["masked"] + alone[1].sums["truncated"] > 0
    plain = gradient(exact_policy, [SAMPLES])
    assert not torch.allclose(alone[0], plain[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_sequences_that_end_a_row_stay_apart_in_any_loss(exact_policy, loss):
    """Of the last sequences of a row all are of the rl component: taken as one, they would share a ratio or a mask."""
    rl = [each for each in SAMPLES if any(each.streams["rl_weights"])] + [sample("f", 8, 6), sample("g", 6, 7)]
    alone = gradient(exact_policy, [[each] for each in rl], loss)
    for rows in ([rl], [rl[:2], rl[2:]]):
        assert_same(alone, gradient(exact_policy, rows, loss))


@settings(max_examples=12, deadline=None)
@given(st.permutations(range(len(SAMPLES))), st.lists(st.integers(1, 4), max_size=3, unique=True))
def test_any_order_and_any_cut(exact_policy, split, order, cuts):
    edges = [0, *sorted(cuts), len(SAMPLES)]
    rows = [[SAMPLES[i] for i in order[start:end]] for start, end in itertools.pairwise(edges)]
    assert_same(split, gradient(exact_policy, rows))


def test_a_component_s_denominator_is_not_diluted_by_the_others(exact_policy):
    """Adding ce samples must not change the rl part of the gradient."""
    rl, ce = sample("a", 9, 1), sample("b", 5, 2, "ce")
    both, only_rl, only_ce = (gradient(exact_policy, [row])[0] for row in ([rl, ce], [rl], [ce]))
    assert_near(both, only_rl + only_ce, 1e-12)


def test_engine_and_learner_agreeing_gives_zero_mismatch(exact_policy):
    before = gradient(exact_policy, [[SAMPLES[0]]])
    same = sample("a", 9, 1)
    same.streams["logprobs"][:] = before[2]["a"][0].tolist()
    _, totals, _ = gradient(exact_policy, [[same]])
    assert before[1].sums["mismatch_kl"] > 1e-3
    assert totals.sums["mismatch_kl"] == pytest.approx(0.0, abs=1e-10)
    num_tokens, advantages = 5, same.streams["advantages"]
    assert totals.sums["rl_loss"] == pytest.approx(-sum(advantages) / num_tokens, rel=1e-5)


def test_what_a_row_is_told_of_its_tokens(exact_policy):
    """Log-probs and entropies at weighted tokens alone, and which of them were masked, as they are stored."""
    batch, objective, statistics = batch_of([SAMPLES]), Objective(IpoLoss(threshold=0.001)), []
    totals = accumulate_gradients(exact_policy, batch, objective, ALONE, CPU, take=statistics.extend)
    (found,), (row,) = statistics, all_rows(batch)
    assert (found.logprobs.dtype, found.entropies.dtype, found.masked.dtype) == (np.float32, np.float32, bool)
    assert found.masked.sum() == totals.sums["masked"] > 0
    weighted = np.zeros(len(found.masked), bool)
    weighted[row.weighted] = True
    assert not (found.masked & ~weighted).any() and found.masked[row.streams["rl_weights"] != 0].any()
    assert (found.logprobs[weighted] < 0).all() and (found.entropies[weighted] > 0).all()
    assert not found.logprobs[~weighted].any() and not found.entropies[~weighted].any()


def test_statistics_are_handed_on_before_too_many_are_held(exact_policy, monkeypatch):
    monkeypatch.setattr(loop, "MOST_HELD", 14)
    handed = []
    accumulate_gradients(exact_policy, batch_of(APART), Objective(DppoLoss()), ALONE, CPU, take=handed.append)
    assert [[entry.row.num_tokens for entry in part] for part in handed] == [[9, 5], [12, 7], [3]]


@pytest.mark.parametrize("loss", [DppoLoss(), GspoLoss()], ids=["of tokens", "of sequences"])
def test_gradients_that_are_averaged_over_ranks_are_made_a_sum(exact_policy, loss):
    class Two(World):
        def gather(self, part):
            return [part]

        gather_to_first = gather

    rows = [SAMPLES[:1]]
    alone, _, _ = gradient(exact_policy, rows, loss)
    exact_policy.zero_grad()
    accumulate_gradients(exact_policy, batch_of(rows), Objective(loss), Two(rank=0, size=2, local_rank=0), CPU)
    assert_near(flat_gradient(exact_policy), 2 * alone, 1e-12)


def test_a_row_is_computed_on_the_device_that_is_asked_for(exact_policy, monkeypatch):
    batch = batch_of([SAMPLES])
    (row,) = all_rows(batch)
    meta = torch.device("meta")
    tokens = loop._tokens(row, meta)
    assert {getattr(tokens, name).device for name in ("engine_logprobs", "rl", "segments")} == {meta}
    asked = []

    def row_loss(policy, row, device, loss):
        asked.append(device)
        return (torch.zeros(len(row.weighted), requires_grad=True, device=device) for _ in range(3))

    def token_loss(logprobs, entropies, tokens, denominators, objective):
        asked.append(tokens.rl.device)
        raise KeyError("as far as devices matter")

    monkeypatch.setattr(loop, "row_loss", row_loss)
    monkeypatch.setattr(loop, "token_loss", token_loss)
    with pytest.raises(KeyError):
        accumulate_gradients(exact_policy, batch, Objective(DppoLoss()), ALONE, meta)
    assert asked == [meta, meta]


def test_nothing_waits_for_the_device_row_by_row(exact_policy):
    """A number that is read by itself waits for every kernel before it, so none is."""
    batch = batch_of(APART)
    exact_policy.zero_grad()
    with Counted("aten::_local_scalar_dense") as read:
        accumulate_gradients(exact_policy, batch, Objective(DppoLoss()), ALONE, CPU)
        clip_gradients(exact_policy, 1e-3, ALONE)
    assert len(all_rows(batch)) > 2 and read.count == 0


@pytest.mark.parametrize("loss", [DppoLoss(), GspoLoss(), PpoLoss(), IpoLoss(sequence_mask=SequenceMask())])
def test_a_row_needs_no_operation_that_a_deterministic_run_refuses(exact_policy, kernel, loss):
    with Counted(*ANY_ORDER) as refused, Counted("aten::mm") as seen:
        accumulate_gradients(exact_policy, batch_of([SAMPLES]), Objective(loss), ALONE, CPU)
    assert refused.count == 0 < seen.count


@pytest.mark.parametrize("values", [[1.0, np.nan], [np.nan, 1.0], [np.nan]])
def test_a_largest_value_that_is_no_number_is_not_lost(values):
    assert np.isnan(_largest(values)) and _largest([1.0, np.inf, 2.0]) == np.inf

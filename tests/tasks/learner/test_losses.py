"""Every loss of the rl component by hand: values, gradients, what is masked and what is truncated."""

import math
from dataclasses import replace

import pytest
import torch

from configs.losses import (
    CispoLoss,
    CustomLoss,
    DppoLoss,
    GspoLoss,
    IpoLoss,
    PpoLoss,
    SequenceMask,
    TruncatedImportance,
)
from tasks.learner.protocol import LearnerError
from tasks.runtime.imports import code_version
from tests.fixtures.builders import exactly
from tests.tasks.learner.slow_losses import Token, packed

pytestmark = pytest.mark.engine


def row(*tokens):
    """Rl tokens of weight 1 from (learner's probability, engine's, advantage, segment)."""
    return [Token(math.log(p), math.log(e), a, rl=1.0, segment=(*s, 0)[0]) for p, e, a, *s in tokens]


def run(tokens, loss):
    """Return the sum of the terms, their gradients, and the counts of masked and truncated tokens."""
    value, gradient, measured = packed(tokens, {"rl": 1}, loss)
    return value, gradient, tuple(int(measured.sums[name]) for name in ("masked", "truncated"))


def assert_terms(tokens, loss, terms, gradient, counts):
    value, slopes, counted = run(tokens, loss)
    assert value == pytest.approx(math.fsum(terms), abs=1e-14)
    assert slopes == pytest.approx(gradient, abs=1e-14)
    assert counted == counts


# Ratios 1.25, 2, 1/2, 2, 0.5; differences +0.1, +0.25, -0.25, +0.35, -0.2.
ROW = row((0.5, 0.4, 2.0), (0.5, 0.25, 1.0), (0.25, 0.5, -1.0), (0.7, 0.35, -3.0), (0.2, 0.4, 0.0))


def test_dppo_masks_by_sign():
    # The fourth moved most, but against its advantage.
    assert_terms(ROW, DppoLoss(kl_tau=0), [-2.5, 6.0], [-2.5, 0, 0, 6.0, 0], (2, 0))


def test_ipo_masks_whatever_the_sign():
    wide = IpoLoss(threshold=0.3, kl_tau=0)
    assert_terms(ROW, wide, [-2.5, -2.0, 0.5], [-2.5, -2.0, 0.5, 0, 0], (1, 0))
    strict = IpoLoss(threshold=0.15, kl_tau=0)
    assert_terms(ROW, strict, [-2.5], [-2.5, 0, 0, 0, 0], (4, 0))


def test_ppo_takes_the_worse_of_clipped_and_unclipped():
    # Clipped at 1.2 (first, second), at 0.8 (third); the fourth rose with a negative advantage and is not clipped.
    assert_terms(ROW, PpoLoss(), [-2.4, -1.2, 0.8, 6.0], [0, 0, 0, 6.0, 0], (3, 0))
    higher = PpoLoss(clip_low=0.2, clip_high=0.28)
    assert_terms(ROW, higher, [-2.5, -1.28, 0.8, 6.0], [-2.5, 0, 0, 6.0, 0], (2, 0))


def test_a_dual_clip_bounds_what_a_negative_advantage_can_do():
    # The fourth has ratio 2 and advantage -3; the others are as without.
    assert_terms(ROW, PpoLoss(dual_clip=1.5), [-2.4, -1.2, 0.8, 4.5], [0, 0, 0, 0, 0], (4, 0))
    assert run(ROW, PpoLoss(dual_clip=2.0)) == run(ROW, PpoLoss()), "a bound is inside"
    far = [Token(-0.1, -900.0, -1.0, rl=1.0)]
    assert_terms(far, PpoLoss(dual_clip=3.0), [3.0], [0.0], (1, 0))
    capped = PpoLoss(dual_clip=1.5, tis=TruncatedImportance(cap=1.0))
    assert_terms(ROW, capped, [-2.4, -1.2, 0.8, 4.5], [0, 0, 0, 0, 0], (4, 0))


def test_the_bound_of_ipo_is_that_of_its_source():
    """prime-rl, IPOLossConfig: 0.1. The differences are +0.1 less rounding, +0.25, -0.25, +0.35 and -0.2."""
    assert IpoLoss().threshold == 0.1
    assert run(row((0.5, 0.45, 1.0), (0.5, 0.35, 1.0), (0.35, 0.5, -1.0)), IpoLoss(kl_tau=0))[2] == (2, 0)


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    loss = CispoLoss(clip_low=0.4, clip_high=0.5)
    weights = [1.25, 1.5, 0.6, 1.5, 0.6]
    gradient = [-w * a for w, a in zip(weights, (2.0, 1.0, -1.0, -3.0, 0.0), strict=True)]
    terms = [g * t.l for g, t in zip(gradient, ROW, strict=True)]
    assert_terms(ROW, loss, terms, gradient, (0, 2))
    assert run(ROW, CispoLoss())[1] == pytest.approx([-2.5, -2.0, 0.5, 6.0, 0.0])


# Ratios of exactly 2 and 1/2, differences of exactly +1/4 and -1/4; and both without an advantage.
EDGES = row((0.5, 0.25, 1.0, 0), (0.25, 0.5, -1.0, 1), (0.5, 0.25, 0.0, 2), (0.25, 0.5, 0.0, 3))


@pytest.mark.parametrize(
    ("at", "beyond"),
    [
        (DppoLoss(mask_low=0.25, mask_high=0.25), DppoLoss(mask_low=0.2499, mask_high=0.2499)),
        (PpoLoss(clip_low=0.5, clip_high=1.0), PpoLoss(clip_low=0.499, clip_high=0.999)),
        (GspoLoss(clip_low=0.5, clip_high=1.0), GspoLoss(clip_low=0.499, clip_high=0.999)),
    ],
    ids=["dppo", "ppo", "gspo"],
)
def test_a_bound_is_inside_and_without_an_advantage_nothing_is_outside(at, beyond):
    assert run(EDGES, at.model_copy(update={"kl_tau": 0.0}))[1:] == (pytest.approx([-2.0, 0.5, 0, 0]), (0, 0))
    assert run(EDGES, beyond.model_copy(update={"kl_tau": 0.0}))[1:] == ([0.0] * 4, (2, 0))


def test_other_bounds_are_inside_too():
    assert run(EDGES, IpoLoss(threshold=0.25))[2] == (0, 0)
    assert run(EDGES, IpoLoss(threshold=0.2499))[2] == (4, 0)
    assert run(EDGES, DppoLoss(tis=TruncatedImportance(cap=2.0), **WIDE))[2] == (0, 0)
    assert run(EDGES, CispoLoss(clip_high=1.0))[2] == (0, 0)
    for ratio in ("geometric", "extremes"):
        assert run(EDGES, masking(ratio, 0.5, 2.0))[2] == (0, 0)
        assert run(EDGES, masking(ratio, 0.501, 1.999))[2] == (4, 0)


WIDE = {"mask_low": 9.0, "mask_high": 9.0, "kl_tau": 0.0}


def masking(ratio, low, high, **changes):
    """A loss that masks no token by itself, with a mask of sequences."""
    return DppoLoss(**WIDE | changes, sequence_mask=SequenceMask(ratio=ratio, low=low, high=high))


SEQUENCES = row((0.8, 0.4, 1.0, 0), (0.25, 0.5, 1.0, 0), (0.4, 0.2, 1.0, 1), (0.4, 0.2, -2.0, 1), (0.1, 0.4, -1.0, 2))


def test_gspo_clips_whole_sequences():
    # Geometric means: 1 (of 2 and 1/2), 2, 1/4.
    loss = GspoLoss(clip_low=0.5, clip_high=0.5)
    assert_terms(SEQUENCES, loss, [-1, -1, -1.5, 4.0, 0.5], [-1, -1, 0, 4.0, 0], (2, 0))


@pytest.mark.essential
def test_gspo_s_gradient_is_that_of_the_sequence_ratio():
    """With one advantage: s A times the sum of the tokens' gradients, which is |y| times the gradient of s A."""
    tokens = row((0.5, 0.4, 1.5), (0.3, 0.25, 1.5), (0.2, 0.3, 1.5))
    l = torch.tensor([t.l for t in tokens], dtype=torch.float64, requires_grad=True)  # noqa: E741
    ratio = (l - torch.tensor([t.q for t in tokens], dtype=torch.float64)).mean().exp()
    (-3 * ratio * 1.5).backward()
    found = run(tokens, GspoLoss(clip_low=0.5, clip_high=0.5))
    assert found[1] == pytest.approx(l.grad.tolist(), rel=1e-12)
    assert found[0] == pytest.approx(-3 * 1.5 * ratio.item(), rel=1e-12)


def test_a_cap_on_the_token_s_ratio():
    tis = TruncatedImportance(level="token", cap=1.5)
    assert_terms(ROW, DppoLoss(tis=tis, **WIDE), [-2.5, -1.5, 0.5, 4.5], [-2.5, -1.5, 0.5, 4.5, 0], (0, 2))
    # Of ppo too, where the clip goes by the ratio as it is.
    assert_terms(ROW, PpoLoss(tis=tis), [-2.4, -1.2, 0.8, 4.5], [0, 0, 0, 4.5, 0], (3, 1))


def test_a_cap_on_the_sequence_s_ratio():
    # Products: 1, 4, 1/4.
    tis = TruncatedImportance(level="sequence", cap=3.0)
    expected = [-1, -1, -3, 6, 0.25]
    assert_terms(SEQUENCES, DppoLoss(tis=tis, **WIDE), expected, expected, (0, 2))
    gspo = GspoLoss(clip_low=0.5, clip_high=0.5, tis=tis)
    assert_terms(SEQUENCES, gspo, [-1, -1, -1.5, 6, 0.5], [-1, -1, 0, 6, 0], (2, 1))
    gradient = [-1, -1, -2, 4, 0.25]
    terms = [g * t.l for g, t in zip(gradient, SEQUENCES, strict=True)]
    assert_terms(SEQUENCES, CispoLoss(clip_high=1.0, tis=tis), terms, gradient, (0, 2))


@pytest.mark.parametrize(
    ("ratio", "low", "high", "kept"),
    [
        ("geometric", 0.5, None, (0, 1)),
        ("geometric", None, 1.5, (0, 2)),
        ("geometric", 0.2, 2.5, (0, 1, 2)),
        ("extremes", 0.6, None, (1,)),
        ("extremes", None, 1.9, (2,)),
        ("extremes", 0.4, 3.0, (0, 1)),
    ],
)
def test_sequences_out_of_bounds_are_left_out_with_all_they_have(ratio, low, high, kept):
    plain = DppoLoss(**WIDE | {"kl_tau": 0.5})
    terms = run(SEQUENCES, plain)[1]
    expected = [each if token.segment in kept else 0.0 for each, token in zip(terms, SEQUENCES, strict=True)]
    value, gradient, counts = run(SEQUENCES, masking(ratio, low, high, kl_tau=0.5))
    assert gradient == pytest.approx(expected)
    assert all(terms)
    assert counts == (sum(token.segment not in kept for token in SEQUENCES), 0)
    alone = [token for token in SEQUENCES if token.segment in kept]
    assert value == pytest.approx(run(alone, plain)[0])


def test_tokens_of_other_components_are_in_no_sequence_ratio():
    others = [Token(-0.1, -9.0, 0.0, ce=1.0, segment=0), Token(-0.1, -9.0, 1.0, ref_kl=1.0, segment=1)]
    loss = GspoLoss(clip_low=0.5, clip_high=0.5, sequence_mask=SequenceMask(ratio="extremes", low=0.1, high=5.0))
    alone, with_others = run(SEQUENCES, loss), run(SEQUENCES + others, loss)
    assert (with_others[1][:5], with_others[2]) == (alone[1], alone[2])
    assert all(with_others[1][:5][index] for index in (0, 1, 3))
    strict = masking("geometric", 0.5, None)
    assert run([*SEQUENCES, replace(others[0], segment=2)], strict)[2] == run(SEQUENCES, strict)[2] == (1, 0)


def test_a_row_whose_sequences_are_all_masked_gives_zero():
    mask = SequenceMask(ratio="geometric", low=50.0, high=None)
    assert run(SEQUENCES, PpoLoss(sequence_mask=mask)) == (0.0, [0.0] * 5, (5, 0))


PATH = "tests.tasks.learner.own_losses"


def test_custom_is_called_with_its_arguments():
    loss = CustomLoss(function=f"{PATH}:reinforce", arguments={"scale": 2.0})
    gradient = [-2.0 * token.advantage for token in ROW]
    assert_terms(ROW, loss, [g * t.l for g, t in zip(gradient, ROW, strict=True)], gradient, (0, 0))


def test_custom_finds_the_same_arguments_at_every_row():
    loss = CustomLoss(function=f"{PATH}:forgetful", arguments={"scales": [2.0]})
    assert (
        run(ROW, loss) == run(ROW, loss) == run(ROW, CustomLoss(function=f"{PATH}:reinforce", arguments={"scale": 2.0}))
    )


def test_custom_may_tell_what_it_masked_and_use_the_cap():
    tis = TruncatedImportance(level="token", cap=1.5)
    loss = CustomLoss(function=f"{PATH}:only_praise", tis=tis)
    assert_terms(ROW, loss, [-2.5, -1.5], [-2.5, -1.5, 0, 0, 0], (2, 1))


def test_custom_counts_for_nothing_outside_its_tokens():
    tokens = [*ROW, Token(-1.0, -2.0, 0.0, ce=1.0)]
    value, gradient, _ = packed(tokens, {"rl": 1, "ce": 1}, CustomLoss(function=f"{PATH}:not_a_number"))
    assert (value, gradient) == (1.0, [0.0] * 5 + [-1.0])


@pytest.mark.parametrize(
    ("function", "words"), [(f"{PATH}:missing", "has no 'missing'"), ("no.such.module:loss", "does not load")]
)
def test_a_custom_loss_that_does_not_load_is_one_clear_error(function, words):
    with pytest.raises(LearnerError, match=f"training.loss.function.*{words}.*nothing was trained"):
        run(ROW, CustomLoss(function=function))


@pytest.mark.parametrize(
    ("function", "what"), [("a_sum", "of shape () for values"), ("a_number", "a float for values")]
)
def test_a_custom_loss_is_told_what_is_needed(function, what):
    said = (
        f"training.loss.function '{PATH}:{function}' gave {what}, where a tensor of shape (2,) is needed, one entry "
        "for each token; nothing was trained"
    )
    with pytest.raises(ValueError, match=exactly(said)) as caught:
        run(row((0.3, 0.3, 1.0), (0.2, 0.3, 1.0)), CustomLoss(function=f"{PATH}:{function}"))
    assert caught.type is ValueError, "for the other ranks it may be none, so that the process must end"


def test_a_custom_loss_is_the_code_that_the_config_was_resolved_with():
    path = f"{PATH}:reinforce"
    resolved = CustomLoss(function=path, version=code_version(path))
    assert run(ROW, resolved) == run(ROW, CustomLoss(function=path))
    with pytest.raises(LearnerError, match=r"is sha256:.* here, and the config was resolved with sha256:0000; nothing"):
        run(ROW, resolved.model_copy(update={"version": "sha256:0000"}))

"""Every loss of the rl component by hand: values, gradients, what is masked and what is truncated."""

import math

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


WIDE = {"mask_low": 9.0, "mask_high": 9.0, "kl_tau": 0.0}
# Ratios 1.25, 2, 1/2, 2, 0.5; differences +0.1, +0.25, -0.25, +0.35, -0.2.
ROW = row((0.5, 0.4, 2.0), (0.5, 0.25, 1.0), (0.25, 0.5, -1.0), (0.7, 0.35, -3.0), (0.2, 0.4, 0.0))
# Geometric means of the ratios: 1 (of 2 and 1/2), 2, 1/4; products: 1, 4, 1/4.
SEQUENCES = row((0.8, 0.4, 1.0, 0), (0.25, 0.5, 1.0, 0), (0.4, 0.2, 1.0, 1), (0.4, 0.2, -2.0, 1), (0.1, 0.4, -1.0, 2))
CAP = TruncatedImportance(level="token", cap=1.5)
OF_SEQUENCE = TruncatedImportance(level="sequence", cap=3.0)
HALF = {"clip_low": 0.5, "clip_high": 0.5}
PATH = "tests.tasks.learner.own_losses"
DOUBLED = CustomLoss(function=f"{PATH}:reinforce", arguments={"scale": 2.0})
PPO = [-2.4, -1.2, 0.8, 6.0]
"""Clipped at 1.2 (first, second), at 0.8 (third); the fourth rose with a negative advantage and is not clipped."""


@pytest.mark.parametrize(
    ("loss", "tokens", "terms", "gradient", "counts"),
    [
        # The fourth moved most, but against its advantage.
        (DppoLoss(kl_tau=0), ROW, [-2.5, 6.0], [-2.5, 0, 0, 6.0, 0], (2, 0)),
        (IpoLoss(threshold=0.3, kl_tau=0), ROW, [-2.5, -2.0, 0.5], [-2.5, -2.0, 0.5, 0, 0], (1, 0)),
        (IpoLoss(threshold=0.15, kl_tau=0), ROW, [-2.5], [-2.5, 0, 0, 0, 0], (4, 0)),
        (PpoLoss(), ROW, PPO, [0, 0, 0, 6.0, 0], (3, 0)),
        (PpoLoss(clip_high=0.28), ROW, [-2.5, -1.28, 0.8, 6.0], [-2.5, 0, 0, 6.0, 0], (2, 0)),
        # The fourth has ratio 2 and advantage -3; a bound is inside.
        (PpoLoss(dual_clip=1.5), ROW, [-2.4, -1.2, 0.8, 4.5], [0] * 5, (4, 0)),
        (PpoLoss(dual_clip=2.0), ROW, PPO, [0, 0, 0, 6.0, 0], (3, 0)),
        (PpoLoss(dual_clip=3.0), [Token(-0.1, -900.0, -1.0, rl=1.0)], [3.0], [0.0], (1, 0)),
        (PpoLoss(dual_clip=1.5, tis=TruncatedImportance(cap=1.0)), ROW, [-2.4, -1.2, 0.8, 4.5], [0] * 5, (4, 0)),
        # Weights 1.25, 1.5, 0.6, 1.5, 0.6; the term is the gradient times the log-prob, here and below.
        (CispoLoss(clip_low=0.4, clip_high=0.5), ROW, None, [-2.5, -1.5, 0.6, 4.5, 0], (0, 2)),
        (CispoLoss(), ROW, None, [-2.5, -2.0, 0.5, 6.0, 0], (0, 0)),
        (GspoLoss(**HALF), SEQUENCES, [-1, -1, -1.5, 4.0, 0.5], [-1, -1, 0, 4.0, 0], (2, 0)),
        (DppoLoss(tis=CAP, **WIDE), ROW, [-2.5, -1.5, 0.5, 4.5], [-2.5, -1.5, 0.5, 4.5, 0], (0, 2)),
        # Of ppo too, where the clip goes by the ratio as it is.
        (PpoLoss(tis=CAP), ROW, [-2.4, -1.2, 0.8, 4.5], [0, 0, 0, 4.5, 0], (3, 1)),
        (DppoLoss(tis=OF_SEQUENCE, **WIDE), SEQUENCES, [-1, -1, -3, 6, 0.25], [-1, -1, -3, 6, 0.25], (0, 2)),
        (GspoLoss(**HALF, tis=OF_SEQUENCE), SEQUENCES, [-1, -1, -1.5, 6, 0.5], [-1, -1, 0, 6, 0], (2, 1)),
        (CispoLoss(clip_high=1.0, tis=OF_SEQUENCE), SEQUENCES, None, [-1, -1, -2, 4, 0.25], (0, 2)),
        (DOUBLED, ROW, None, [-2.0 * token.advantage for token in ROW], (0, 0)),
        # One that tells what it masked, and uses the cap.
        (CustomLoss(function=f"{PATH}:only_praise", tis=CAP), ROW, [-2.5, -1.5], [-2.5, -1.5, 0, 0, 0], (2, 1)),
    ],
)
def test_terms_by_hand(loss, tokens, terms, gradient, counts):
    value, slopes, counted = run(tokens, loss)
    if terms is None:
        terms = [slope * token.l for slope, token in zip(gradient, tokens, strict=True)]
    assert value == pytest.approx(math.fsum(terms), abs=1e-14)
    assert slopes == pytest.approx(gradient, abs=1e-14)
    assert counted == counts


def test_the_bound_of_ipo_is_that_of_its_source():
    """prime-rl, IPOLossConfig: 0.1. The differences are +0.1 less rounding, +0.25, -0.25, +0.35 and -0.2."""
    assert IpoLoss().threshold == 0.1
    assert run(row((0.5, 0.45, 1.0), (0.5, 0.35, 1.0), (0.35, 0.5, -1.0)), IpoLoss(kl_tau=0))[2] == (2, 0)


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


def masking(ratio, low, high, **changes):
    """A loss that masks no token by itself, with a mask of sequences."""
    return DppoLoss(**WIDE | changes, sequence_mask=SequenceMask(ratio=ratio, low=low, high=high))


@pytest.mark.essential
def test_gspo_s_gradient_is_that_of_the_sequence_ratio():
    """With one advantage: s A times the sum of the tokens' gradients, which is |y| times the gradient of s A."""
    tokens = row((0.5, 0.4, 1.5), (0.3, 0.25, 1.5), (0.2, 0.3, 1.5))
    l = torch.tensor([t.l for t in tokens], dtype=torch.float64, requires_grad=True)  # noqa: E741
    ratio = (l - torch.tensor([t.q for t in tokens], dtype=torch.float64)).mean().exp()
    (-3 * ratio * 1.5).backward()
    found = run(tokens, GspoLoss(**HALF))
    assert found[1] == pytest.approx(l.grad.tolist(), rel=1e-12)
    assert found[0] == pytest.approx(-3 * 1.5 * ratio.item(), rel=1e-12)


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
    _, gradient, counts = run(SEQUENCES, masking(ratio, low, high, kl_tau=0.5))
    assert gradient == pytest.approx(expected) and all(terms)
    assert counts == (sum(token.segment not in kept for token in SEQUENCES), 0)


def test_custom_finds_the_same_arguments_at_every_row():
    loss = CustomLoss(function=f"{PATH}:forgetful", arguments={"scales": [2.0]})
    assert run(ROW, loss) == run(ROW, loss) == run(ROW, DOUBLED)


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

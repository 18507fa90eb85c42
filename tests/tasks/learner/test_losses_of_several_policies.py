"""Losses of sequences that several policies sampled, in expectation over all of them: exact sums, no sampling.

Token t of a sequence was sampled by a policy of its own, whose log-prob is recorded, and a third one is trained. Ratios
then go by the recorded log-probs, so that it does not matter which policy a token is of, as long as it is its own.
"""

import itertools
import math

import pytest

from configs.losses import CispoLoss, DppoLoss, IpoLoss, PpoLoss, TruncatedImportance
from tests.tasks.learner.slow_losses import Token, packed

pytestmark = pytest.mark.engine

NUM_TOKENS, LENGTH = 3, 3
SEQUENCES = list(itertools.product(range(NUM_TOKENS), repeat=LENGTH))
WIDE = 1e6
"""A bound that no ratio here reaches."""
BY_TOKEN = {
    "dppo": DppoLoss(mask_low=1.0, mask_high=1.0, kl_tau=0.0),
    "ipo": IpoLoss(threshold=1.0, kl_tau=0.0),
    "ppo": PpoLoss(clip_low=1 - 1e-9, clip_high=WIDE),
    "cispo": CispoLoss(clip_high=WIDE),
    "dppo, tis": DppoLoss(mask_low=1.0, mask_high=1.0, kl_tau=0.0, tis=TruncatedImportance(level="token", cap=WIDE)),
}
BY_SEQUENCE = DppoLoss(mask_low=1.0, mask_high=1.0, kl_tau=0.0, tis=TruncatedImportance(level="sequence", cap=WIDE))


def policy(seed):
    """A policy whose probabilities of the next token depend on all tokens before."""

    def probabilities(prefix):
        scores = [math.exp(0.8 * math.sin(seed + 3 * token + sum(7 * t + 1 for t in prefix))) for token in range(3)]
        return [score / sum(scores) for score in scores]

    return probabilities


OLD, NEW, LEARNER = policy(1), policy(2), policy(3)
MIXED = (OLD, NEW, NEW)
"""The policies of the tokens of a sequence: weights were exchanged after its first token."""


def advantage(sequence):
    return math.cos(sum(token * 5**place for place, token in enumerate(sequence)))


def gradient(loss, sampled_by, recorded):
    """The expected gradient of a loss by the learner's scores of each token after each prefix."""
    found = {}
    for sequence in SEQUENCES:
        prefixes = [sequence[:place] for place in range(LENGTH)]
        pairs = list(zip(prefixes, sequence, strict=True))
        chance = math.prod(by(prefix)[token] for by, (prefix, token) in zip(sampled_by, pairs, strict=True))
        q = [math.log(by(prefix)[token]) for by, (prefix, token) in zip(recorded, pairs, strict=True)]
        row = [
            Token(math.log(LEARNER(prefix)[token]), engine, advantage(sequence), rl=1.0)
            for engine, (prefix, token) in zip(q, pairs, strict=True)
        ]
        _, slopes, _ = packed(row, {"rl": 1}, loss)
        for slope, (prefix, token) in zip(slopes, pairs, strict=True):
            for other, share in enumerate(LEARNER(prefix)):
                found[prefix, other] = found.get((prefix, other), 0.0) + chance * slope * ((token == other) - share)
    return found


@pytest.mark.parametrize("name", BY_TOKEN)
def test_a_ratio_per_token_makes_each_token_one_of_the_learner_after_its_prefix(name):
    loss = BY_TOKEN[name]
    for place in range(LENGTH):
        # Who sampled what comes after a token does not matter for its ratio, only for what it is worth.
        of_learner = (*MIXED[:place], LEARNER, *MIXED[place + 1 :])
        expected, found = (gradient(loss, policies, policies) for policies in (of_learner, MIXED))
        wrong = gradient(loss, MIXED, (OLD,) * LENGTH)
        here = [key for key in found if len(key[0]) == place]
        assert [found[key] for key in here] == pytest.approx([expected[key] for key in here], abs=1e-12)
        is_right = [wrong[key] for key in here] == pytest.approx([expected[key] for key in here], abs=1e-4)
        assert is_right == (MIXED[place] is OLD), "the log-prob of another policy in place of the token's own"


def test_the_ratio_of_a_sequence_makes_it_one_of_the_learner():
    expected = gradient(BY_SEQUENCE, (LEARNER,) * LENGTH, (LEARNER,) * LENGTH)
    assert gradient(BY_SEQUENCE, MIXED, MIXED) == pytest.approx(expected, abs=1e-12)
    assert gradient(BY_SEQUENCE, MIXED, (OLD,) * LENGTH) != pytest.approx(expected, abs=1e-3)

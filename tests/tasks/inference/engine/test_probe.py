"""When log-probs on the probe stop a run: by their mean difference, and by the token that is read through the cache."""

import math
from dataclasses import dataclass

import pytest

from configs.services import EngineConfig
from tasks.inference.engine.checks import EngineMismatch, check_serving, tolerance

LENGTH = 160
ROW = {
    "policy_key": "p",
    "version": 3,
    "probe_token_ids": list(range(LENGTH)),
    "probe_logprobs": [0.0, *[-2.0] * (LENGTH - 1)],
}
HALF = EngineConfig(dtype="bfloat16")


@dataclass
class FarEngine:
    """An engine whose log-probs are off by known differences: a no network between."""

    differences: list[float]
    cached: float = 0.0
    url: str = "http://engine"

    def probes(self, token_ids, policy_key):
        first, *others = self.differences
        return -2.0 + others[-1] + self.cached, [first, *(-2.0 + far for far in others)]


def spread(usual, *outliers):
    """Differences of `usual`, the first ones replaced; the first token of all has none."""
    return [0.0, *outliers, *[usual] * (LENGTH - 1 - len(outliers))]


def check(differences, cached=0.0, config=HALF, same=True):
    return check_serving(FarEngine(differences, cached), ROW, config, same_weights=same)


@pytest.mark.parametrize(
    "config", [HALF, EngineConfig(dtype="float32"), HALF.model_copy(update={"probe_tolerance": 0.1})]
)
def test_the_mean_difference_is_held_by_the_tolerance_of_the_precision(config):
    allowed = tolerance(config)
    assert check(spread(0.9 * allowed), config=config) == pytest.approx(0.9 * allowed, rel=0.02)
    assert check(spread(0.1 * allowed, 3 * allowed, 30 * allowed), config=config) < allowed, "outliers of single tokens"
    for same, cause in ((True, "holds the right weights and computes otherwise"), (False, "it holds other weights")):
        for far in (spread(1.1 * allowed), spread(0.0, math.nan)):
            with pytest.raises(EngineMismatch, match=cause):
                check(far, config=config, same=same)


def test_precisions_have_their_tolerances():
    assert [tolerance(EngineConfig(dtype=dtype)) for dtype in ("float32", "bfloat16")] == [1e-3, 0.25]
    assert tolerance(EngineConfig(dtype="float32", probe_tolerance=0.1)) == 0.1


def test_a_stale_cache_stops_whatever_the_weights():
    check(spread(0.02), cached=0.9)
    for cached in (1.4, math.nan):
        with pytest.raises(EngineMismatch, match="prefix cache holds states of other weights"):
            check(spread(0.02), cached=cached)

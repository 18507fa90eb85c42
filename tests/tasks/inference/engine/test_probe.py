"""When log-probs on the probe stop a run: in float32 by the largest difference, in half precision by their spread."""

import logging
import math
from dataclasses import dataclass
from typing import Any

import pytest

from configs.services import EngineConfig
from tasks.inference.engine.checks import EngineMismatch, check_serving

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

    def probes(self, token_ids: list[int], policy_key: str) -> tuple[float, list[float]]:
        return -2.0 + self.differences[-1] + self.cached, [-2.0 + each for each in self.differences]


def spread(usual: float, *outliers: float) -> list[float]:
    """Differences of `usual`, the first ones replaced; the first token of all has none."""
    return [2.0, *outliers, *[usual] * (LENGTH - 1 - len(outliers))]


def check(differences: list[float], cached: float = 0.0, config: EngineConfig = HALF, same: bool = True) -> float:
    engine: Any = FarEngine(differences, cached)
    return check_serving(engine, ROW, config, same_weights=same)


def test_one_outlier_in_half_precision_stops_only_where_the_weights_are_not_known() -> None:
    far = spread(0.02, 0.32)
    assert check(far) == pytest.approx(0.32)
    with pytest.raises(EngineMismatch, match="it holds other weights"):
        check(far, same=False)


@pytest.mark.parametrize("differences", [spread(1.1), spread(0.02, math.nan)])
def test_an_engine_that_computes_otherwise_stops(differences: list[float]) -> None:
    with pytest.raises(EngineMismatch, match="holds the right weights and computes otherwise"):
        check(differences)


def test_more_than_usual_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check(spread(0.03))
        assert not caplog.records
        check(spread(0.06))
        check(spread(0.02, 3.0, 3.0, 3.0))  # what stopped a run of equal weights before
    assert "off by 0.0596" in caplog.text and "99th percentile 3" in caplog.text


def test_a_stale_cache_stops_whatever_the_weights() -> None:
    with pytest.raises(EngineMismatch, match="prefix cache holds states of other weights"):
        check(spread(0.02), cached=1.4)


def test_float32_and_a_bound_of_ones_own_are_held_by_the_largest() -> None:
    for config in (EngineConfig(dtype="float32"), EngineConfig(dtype="bfloat16", probe_tolerance=0.1)):
        with pytest.raises(EngineMismatch, match="computes otherwise"):
            check(spread(0.0, 0.32), config=config)

"""Learning rates by hand, and what every schedule has in common."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.training import TrainingConfig
from tasks.learner.optimizer import learning_rate

HALF = math.sqrt(0.5)
COSINE = {"schedule": {"type": "cosine", "min_ratio": 0.2}, "decay_steps": 8}
WSD = {"schedule": {"type": "wsd", "final_steps": 4}, "warmup_steps": 2, "decay_steps": 10}


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, {0: 1.0, 1: 1.0, 10_000: 1.0}),
        ({"warmup_steps": 4}, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 99: 1.0}),
        ({"warmup_steps": 4, "schedule": {"type": "constant"}}, {0: 0.25, 3: 1.0, 4: 1.0, 99: 1.0}),
        ({"decay_steps": 4}, {0: 1.0, 1: 0.75, 3: 0.25, 4: 0.0, 9: 0.0}),
        ({"warmup_steps": 2, "decay_steps": 6}, {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.75, 5: 0.25, 6: 0.0, 7: 0.0}),
        ({"decay_steps": 4, "schedule": {"min_ratio": 0.2}}, {0: 1.0, 1: 0.8, 2: 0.6, 3: 0.4, 4: 0.2, 9: 0.2}),
        (COSINE, {0: 1.0, 2: 0.6 + 0.4 * HALF, 4: 0.6, 6: 0.6 - 0.4 * HALF, 8: 0.2, 9: 0.2}),
        (COSINE | {"warmup_steps": 4}, {0: 0.25, 3: 1.0, 4: 1.0, 5: 0.6 + 0.4 * HALF, 6: 0.6, 8: 0.2}),
        (WSD, {0: 0.5, 1: 1.0, 5: 1.0, 6: 1.0, 7: 0.5, 8: 1 - HALF, 9: 1 - math.sqrt(0.75), 10: 0.0, 11: 0.0}),
        (
            WSD | {"schedule": {"type": "wsd", "final_steps": 4, "shape": "linear", "min_ratio": 0.2}},
            {1: 1.0, 6: 1.0, 7: 0.8, 8: 0.6, 9: 0.4, 10: 0.2, 11: 0.2},
        ),
    ],
)
def test_by_hand(settings, rates):
    config = config_of(settings)
    assert {step: learning_rate(step, config) for step in rates} == pytest.approx(
        {step: 2e-3 * rate for step, rate in rates.items()}
    )


def config_of(settings):
    schedule = {"type": "linear", **settings.get("schedule", {})}
    return TrainingConfig(learning_rate=2e-3, **{**settings, "schedule": schedule})


@given(
    kind=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup=st.integers(0, 20),
    length=st.integers(1, 60),
    ratio=st.sampled_from([0.0, 0.1, 1.0]),
    shape=st.sampled_from(["sqrt", "linear"]),
)
def test_up_to_the_peak_and_down_to_the_rest_of_it(kind, warmup, length, ratio, shape):
    """Never above the peak, never rising after warm-up, at the peak where the decay begins, at the end what is left."""
    final = 1 + length // 2
    special = {"constant": {}, "wsd": {"min_ratio": ratio, "shape": shape, "final_steps": final}}
    schedule = {"type": kind, **special.get(kind, {"min_ratio": ratio})}
    config = config_of({"warmup_steps": warmup, "decay_steps": warmup + length, "schedule": schedule})
    peak = config.learning_rate
    rates = [learning_rate(step, config) for step in range(warmup + length + 3)]
    assert rates[:warmup] == [peak * (step + 1) / warmup for step in range(warmup)]
    down = rates[warmup:]
    assert down[0] == pytest.approx(peak, rel=1e-12)
    assert all(after <= before for before, after in itertools.pairwise(down))
    assert down[length:] == pytest.approx([peak * (1.0 if kind == "constant" else ratio)] * 3, rel=1e-12, abs=0)
    if kind == "wsd":
        assert down[: length - final + 1] == [peak] * (length - final + 1)
        assert ratio == 1.0 or down[length - final + 1] < peak

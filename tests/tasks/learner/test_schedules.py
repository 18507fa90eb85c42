"""Learning rates by hand, and what every schedule has in common."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.training import TrainingConfig
from tasks.learner.optimizer import learning_rate

WSD = {"warmup_steps": 2, "decay_steps": 10}


@pytest.mark.parametrize(
    ("schedule", "settings", "rates"),
    [
        ({}, {}, [1]),
        ({}, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1]),
        ({"type": "constant"}, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1]),
        ({}, {"decay_steps": 4}, [1, 0.75, 0.5, 0.25, 0]),
        ({}, {"warmup_steps": 2, "decay_steps": 6}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ({"min_ratio": 0.2}, {"decay_steps": 4}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"type": "cosine", "min_ratio": 0.2}, {"decay_steps": 4}, [1, 0.8828427, 0.6, 0.3171573, 0.2]),
        (
            {"type": "cosine", "min_ratio": 0.2},
            {"warmup_steps": 4, "decay_steps": 8},
            [0.25, 0.5, 0.75, 1, 1, 0.8828427, 0.6, 0.3171573, 0.2],
        ),
        ({"type": "wsd", "final_steps": 4}, WSD, [0.5, *[1] * 6, 0.5, 0.2928932, 0.1339746, 0]),
        (
            {"type": "wsd", "final_steps": 4, "shape": "linear", "min_ratio": 0.2},
            WSD,
            [0.5, *[1] * 6, 0.8, 0.6, 0.4, 0.2],
        ),
    ],
)
def test_by_hand(schedule, settings, rates):
    """The rates of the first steps, in shares of the peak; all steps after them have the last one."""
    config = config_of(schedule, **settings)
    steps = [*range(len(rates) + 2), 10_000]
    expected = pytest.approx([2e-3 * rate for rate in [*rates, *rates[-1:] * 3]], rel=1e-6, abs=1e-12)
    assert [learning_rate(step, config) for step in steps] == expected


def config_of(schedule, **settings):
    return TrainingConfig(learning_rate=2e-3, schedule={"type": "linear"} | schedule, **settings)


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
    schedule = {"type": kind} | special.get(kind, {"min_ratio": ratio})
    config = config_of(schedule, warmup_steps=warmup, decay_steps=warmup + length)
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

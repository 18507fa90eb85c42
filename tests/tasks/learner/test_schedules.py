"""Learning rates by hand, and what every schedule has in common."""

import pytest

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

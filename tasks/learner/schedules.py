"""Learning rates as pure functions of the step: a run that was killed, resumed or branched off has the same ones."""

import math

from configs.optimizers import WsdSchedule
from configs.training import TrainingConfig


def learning_rate(step: int, settings: TrainingConfig) -> float:
    """Return the rate of the 0-based optimizer step: linear warm-up to the peak, then what the schedule says.

    Warm-up reaches the peak with its last step. Of the way down, `min_ratio + (1 - min_ratio) f(x)` of the peak is left
    after a share x of it, with f(x) = 1 - x (linear), (1 + cos(pi x)) / 2 (cosine; SGDR, arXiv 1608.03983) or
    1 - sqrt(x) (wsd; arXiv 2405.18392). From `decay_steps` on x is 1.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    schedule = settings.schedule
    if schedule.type == "constant" or not settings.decay_steps:
        return settings.learning_rate
    start = settings.warmup_steps
    if isinstance(schedule, WsdSchedule):
        start = settings.decay_steps - schedule.final_steps
    left = min(1.0, max(0.0, (settings.decay_steps - step) / max(1, settings.decay_steps - start)))
    shape = schedule.shape if isinstance(schedule, WsdSchedule) else schedule.type
    return settings.learning_rate * (schedule.min_ratio + (1 - schedule.min_ratio) * _fallen(shape, left))


def _fallen(shape: str, left: float) -> float:
    """Return f where the share `left` of the way is still to go."""
    if shape == "cosine":
        return (1 - math.cos(math.pi * left)) / 2
    return 1 - math.sqrt(1 - left) if shape == "sqrt" else left

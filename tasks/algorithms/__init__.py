"""The algorithms by the `type` of their config section: one small file each, one line here."""

from tasks.algorithms.credit import AdvantageBreach, Algorithm, Credit, Kept
from tasks.algorithms.grpo import grpo
from tasks.algorithms.rloo import rloo
from tasks.algorithms.supervised import supervised

ALGORITHMS = {
    "grpo": Algorithm(grpo, zero_sum=True),
    "rloo": Algorithm(rloo, zero_sum=True),
    "supervised": Algorithm(supervised, zero_sum=False),
}

__all__ = ["ALGORITHMS", "AdvantageBreach", "Algorithm", "Credit", "Kept"]

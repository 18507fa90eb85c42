"""The samplers by the `type` of their config section: one small file each, one line here."""

from tasks.samplers.asked import Asked, Sampler
from tasks.samplers.difficulty_pools import difficulty_pools
from tasks.samplers.standard import standard

SAMPLERS: dict[str, Sampler] = {"standard": standard, "difficulty_pools": difficulty_pools}

__all__ = ["SAMPLERS", "Asked", "Sampler"]

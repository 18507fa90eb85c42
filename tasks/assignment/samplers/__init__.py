"""The samplers by the `type` of their config section: one small file each, one line here."""

from tasks.assignment.samplers.difficulty_pools import difficulty_pools
from tasks.assignment.samplers.sampler import Sampler
from tasks.assignment.samplers.standard import standard

SAMPLERS: dict[str, Sampler] = {"standard": standard, "difficulty_pools": difficulty_pools}

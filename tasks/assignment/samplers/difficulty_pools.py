"""Difficulty pools: examples are drawn by the weight of their pool, which says how hard they were the last time."""

from collections.abc import Iterator
from math import log

from configs.sections import AssignmentConfig, DifficultyPoolsSampler
from tasks.arrays.permutation import digest
from tasks.assignment.samplers.sampler import SampleRequest


def difficulty_pools(asked: SampleRequest, assignment: AssignmentConfig, settings: DifficultyPoolsSampler) -> list[str]:
    """Return examples drawn without replacement, each time in proportion to the weights of those that are left.

    The smallest of the numbers -log(u) / weight come first, with u a hash of example, step and batch as a number
    between 0 and 1: the same as drawing one after the other (Efraimidis and Spirakis 2006). Where more are wanted than
    there are, all are drawn and then all again; those that the step has tried in earlier batches come last.
    """
    drawn = _draw_examples(asked, settings)
    return [next(drawn) for _ in asked.turns]


def weight_of(reward: float | None, settings: DifficultyPoolsSampler) -> float:
    """Return the weight of an example by the mean reward of its last group; None was not scored yet."""
    if reward is None:
        return settings.unseen_weight
    pool = next((pool for pool in settings.pools if reward <= pool.threshold), settings.pools[-1])
    return pool.weight


def _draw_examples(asked: SampleRequest, settings: DifficultyPoolsSampler) -> Iterator[str]:
    weights = {example: weight_of(asked.difficulties.get(example), settings) for example in asked.examples}
    again = 0
    while True:
        seed = ("pool", asked.seed, asked.environment, asked.step, asked.batch, again)
        late = {example: -log(_uniform(*seed, example)) / weights[example] for example in asked.examples}
        yield from sorted(asked.examples, key=lambda example: (example in asked.taken, late[example], example))
        again += 1


def _uniform(*parts: object) -> float:
    """Return a number above 0 and below 1 that depends on every part and on nothing else."""
    # 53 bits are what a float holds exactly; the half keeps away from 0, which has no logarithm.
    return float(((digest(*parts) >> 11) + 0.5) / 2**53)

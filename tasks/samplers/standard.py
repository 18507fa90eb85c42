"""Standard: an environment's examples in epochs, all of them once and then all again."""

from collections.abc import Sequence
from functools import cache

from configs.samplers import StandardSampler
from configs.sections import AssignmentConfig
from tasks.samplers.asked import Asked
from tasks.walk import digest, permutation


def standard(asked: Asked, assignment: AssignmentConfig, settings: StandardSampler) -> list[str]:
    """Return the examples at the turns' places in their epochs.

    A further batch of a step has an order of its own, in which it goes on to the next example where it meets one that
    the step has tried already, as long as there is another.
    """
    order = cache(lambda epoch: _order(asked, epoch, assignment.shuffle))
    chosen: list[str] = []
    for turn in asked.turns:
        epoch, place = divmod(turn, len(asked.examples))
        tried = asked.taken | set(chosen) if asked.taken else frozenset()
        walk = (asked.examples[number] for number in (*order(epoch)[place:], *order(epoch)[:place]))
        chosen.append(next((each for each in walk if each not in tried), asked.examples[order(epoch)[place]]))
    return chosen


def _order(asked: Asked, epoch: int, shuffle: bool) -> Sequence[int]:
    count = len(asked.examples)
    if not shuffle:
        return range(count)
    order: list[int] = permutation(count, digest("order", asked.seed, asked.environment, epoch, asked.batch)).tolist()
    return order

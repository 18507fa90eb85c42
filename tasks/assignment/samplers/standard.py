"""Standard: an environment's examples in epochs, all of them once and then all again."""

from collections.abc import Sequence
from functools import cache

from configs.sections import AssignmentConfig, StandardSampler
from tasks.arrays.permutation import digest, permutation
from tasks.assignment.samplers.sampler import SampleRequest


def standard(asked: SampleRequest, assignment: AssignmentConfig, settings: StandardSampler) -> list[str]:
    """Return the examples at the turns' places in their epochs.

    A further batch of a step has an order of its own, in which it goes on to the next example where it meets one that
    the step has tried already, as long as there is another.
    """
    order = cache(lambda epoch: _order(asked, epoch, assignment.shuffle))
    chosen: list[str] = []
    tried, count = set(asked.taken), len(asked.examples)
    for turn in asked.turns:
        epoch, place = divmod(turn, count)
        first = asked.examples[order(epoch)[place]]
        walk = (asked.examples[order(epoch)[(place + further) % count]] for further in range(count))
        chosen.append(next((each for each in walk if each not in tried), first))
        # In the first batch of a step turns alone decide: an example comes twice where an epoch ends within it.
        if asked.taken:
            tried.add(chosen[-1])
    return chosen


def _order(asked: SampleRequest, epoch: int, shuffle: bool) -> Sequence[int]:
    count = len(asked.examples)
    if not shuffle:
        return range(count)
    order: list[int] = permutation(count, digest("order", asked.seed, asked.environment, epoch, asked.batch)).tolist()
    return order

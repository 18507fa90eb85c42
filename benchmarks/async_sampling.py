"""What steps gain from `rollout.max_off_policy_steps`, in a model of engine and learner: nothing is started.

`python -m benchmarks.async_sampling` prints the table of `benchmarks/async_sampling.md`. In the model a rollout lasts
as long as it is drawn to, however many run beside it, up to a limit; the learner takes the same time for each step; a
policy is exchanged in no time. The rules are those of the pipeline: with 0 in turn, with 1 the next step is sampled
while one trains, with more in a stream, where a newer policy begins no group before what was begun has ended.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean

STEPS, GROUPS, GROUP_SIZE, SEEDS = 60, 8, 8, 5
BOUNDS = (0, 1, 2, 4)
LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "0.8 to 1.2 s": lambda chance: chance.uniform(0.8, 1.2),
    "log-normal, median 1 s, sigma 1": lambda chance: chance.lognormvariate(0, 1),
    "1 s, one in twenty 20 s": lambda chance: 20.0 if chance.random() < 0.05 else 1.0,
}
"""Seconds of a rollout."""
Groups = Sequence[Sequence[float]]
"""Seconds of the rollouts of each group, in the order in which groups are assigned."""


@dataclass(frozen=True)
class Outcome:
    """How a run went in the model."""

    seconds: float
    busy: float
    """Share of the places for rollouts that had one, from the beginning to the end."""
    oldest: int = 0
    """Most steps from the policy that sampled a group to the one that was trained on it."""


def sampling_end(groups: Groups, begun: float, places: int) -> float:
    """Return when the last rollout of some groups ends, sampled in their order from a moment on."""
    free = [begun] * places
    for seconds in (each for group in groups for each in group):
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def run_in_steps(groups: Groups, ahead: bool, places: int, learner: float) -> Outcome:
    """Go through a run whose steps are sampled whole, in turn or one `ahead` of the training."""
    steps = [groups[first : first + GROUPS] for first in range(0, len(groups), GROUPS)]
    made, ended = [0.0], 0.0  # when each policy was there, and when the last rollouts ended
    for step, own in enumerate(steps):
        begun = max(ended, made[max(0, step - ahead)])
        ended = sampling_end(own, begun, places)
        made.append(max(ended, made[-1]) + learner)
    work = sum(map(sum, groups))
    return Outcome(made[-1], work / (made[-1] * places), int(ahead))


@dataclass
class StreamModel:
    """A run whose steps take the groups that end first."""

    groups: Groups
    bound: int
    places: int
    learner: float
    version: int = 0
    sampler: int = 0
    """The version of the policy that samples; behind `version` while what it began is ending."""
    running: int = 0
    trains: bool = False
    waiting: deque[tuple[int, float]] = field(default_factory=deque)
    """Rollouts of groups that were begun, without a place yet."""
    events: list[tuple[float, int]] = field(default_factory=list)
    """When rollouts of a group end; group -1 is the learner's step."""
    begun: list[int] = field(default_factory=list)
    """The version that sampled each group, in order."""
    ended: list[int] = field(default_factory=list)

    def run(self) -> Outcome:
        """Go from event to event until the last step is trained."""
        left, now, steps = [len(group) for group in self.groups], 0.0, len(self.groups) // GROUPS
        while self.version < steps:
            self._fill(now)
            if not self.trains and len(self.ended) >= (self.version + 1) * GROUPS:
                self.trains = True
                heapq.heappush(self.events, (now + self.learner, -1))
            now, group = heapq.heappop(self.events)
            if group < 0:
                self.version, self.trains = self.version + 1, False
                continue
            self.running, left[group] = self.running - 1, left[group] - 1
            if not left[group]:
                self.ended.append(group)
        ages = [place // GROUPS - self.begun[group] for place, group in enumerate(self.ended)]
        return Outcome(now, sum(map(sum, self.groups)) / (now * self.places), max(ages))

    def _fill(self, now: float) -> None:
        if not self.running and not self.waiting:
            self.sampler = self.version
        # As in the pipeline, the last policies bring no further assignments, and the one before goes on.
        newest = min(self.version, max(0, len(self.groups) // GROUPS - 1 - self.bound))
        assigned = min((newest + self.bound + 1) * GROUPS, len(self.groups))
        while self.running < self.places:
            if not self.waiting:
                if self.sampler < newest or len(self.begun) == assigned:
                    return
                group = len(self.begun)
                self.begun.append(self.sampler)
                self.waiting.extend((group, seconds) for seconds in self.groups[group])
            group, seconds = self.waiting.popleft()
            self.running += 1
            heapq.heappush(self.events, (now + seconds, group))


def outcome(bound: int, groups: Groups, places: int, learner: float) -> Outcome:
    """Return how a run goes with a value of `rollout.max_off_policy_steps`."""
    if bound > 1:
        return StreamModel(groups, bound, places, learner).run()
    return run_in_steps(groups, bool(bound), places, learner)


def draw(kind: str, seed: int, steps: int = STEPS) -> Groups:
    """Return the rollouts of a run, drawn from a distribution of lengths."""
    chance = random.Random(seed)
    return [[LENGTHS[kind](chance) for _ in range(GROUP_SIZE)] for _ in range(steps * GROUPS)]


def main() -> None:
    """Print the table: seconds a step, and the share of places that had a rollout."""
    print("| rollouts | learner | " + " | ".join(f"n = {bound}" for bound in BOUNDS) + " |")
    print("|---|---|" + "---|" * len(BOUNDS))
    for kind in LENGTHS:
        for learner in (1.0, 4.0):
            cells = []
            for bound in BOUNDS:
                found = [outcome(bound, draw(kind, seed), GROUPS * GROUP_SIZE, learner) for seed in range(SEEDS)]
                seconds, busy = mean(each.seconds for each in found) / STEPS, mean(each.busy for each in found)
                cells.append(f"{seconds:.1f} s, {busy:.0%}")
            print(f"| {kind} | {learner:g} s | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

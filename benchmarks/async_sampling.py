"""What steps gain from `rollout.max_off_policy_steps`, in a model of engine and learner: nothing is started.

`python -m benchmarks.async_sampling` prints the table of `benchmarks/async_sampling.md`. In the model a rollout lasts
as long as it is drawn to, however many run beside it, up to a limit; the learner takes the same time for each step; a
policy is exchanged in no time. The rules are those of the pipeline: with 0 in turn, with 1 the next step is sampled
while one trains, with more in a stream, by each value of `rollout.weight_update`. Real runs are in async_running.py.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from statistics import mean

STEPS, GROUPS, GROUP_SIZE, SEEDS = 60, 8, 8, 5
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
    """A run whose steps take groups from a stream, with room left for those that are due."""

    groups: Groups
    bound: int
    places: int
    learner: float
    update: str
    """What becomes of what is under way when a newer policy is there: rollout.weight_update."""
    version: int = 0
    sampler: int = 0
    """The version of the policy that begins groups; with `wait` behind `version` while what it began is ending."""
    trains: bool = False
    waiting: deque[tuple[int, float]] = field(default_factory=deque)
    """Rollouts of groups that were begun, without a place yet."""
    running: dict[int, int] = field(default_factory=dict)
    """Rollouts under way, by number, with their groups."""
    events: list[tuple[float, int]] = field(default_factory=list)
    """When rollouts end, by number; number -1 is the learner's step."""
    begun: dict[int, int] = field(default_factory=dict)
    """The version that began each group."""
    ended: list[int] = field(default_factory=list)
    """Groups that no step has taken yet."""
    taken: list[int] = field(default_factory=list)
    busy: float = 0.0

    def run(self) -> Outcome:
        """Go from event to event until the last step is trained."""
        steps, now, oldest = len(self.groups) // GROUPS, 0.0, 0
        self.left = [len(group) for group in self.groups]
        self.queue = deque(range(len(self.groups)))
        self.numbers = count()
        while self.version < steps:
            self._fill(now)
            self._take()
            if not self.trains and len(self.taken) >= (self.version + 1) * GROUPS:
                own = self.taken[self.version * GROUPS : (self.version + 1) * GROUPS]
                oldest = max(oldest, *(self.version - self.begun[group] for group in own))
                self.trains = True
                heapq.heappush(self.events, (now + self.learner, -1))
            before, (now, number) = now, heapq.heappop(self.events)
            self.busy += (now - before) * len(self.running)
            if number < 0:
                self.version, self.trains = self.version + 1, False
                self._update()
            elif number in self.running:  # else it was dropped
                group = self.running.pop(number)
                self.left[group] -= 1
                if not self.left[group]:
                    self.ended.append(group)
        return Outcome(now, self.busy / (now * self.places), oldest)

    def _newest(self) -> int:
        # As in the pipeline, the last policies bring no further assignments, and the one before goes on.
        return min(self.version, max(0, len(self.groups) // GROUPS - 1 - self.bound))

    def _update(self) -> None:
        """Let the newest policy sample, if the rules let it."""
        if self.update == "keep":
            self.sampler = self._newest()
        elif self.update == "abort" and self.sampler != self._newest():
            self.sampler = self._newest()
            dropped = sorted({*self.running.values()} | {group for group, _ in self.waiting})
            self.running.clear()
            self.waiting.clear()
            for group in reversed(dropped):
                self.queue.appendleft(group)
                self.left[group] = len(self.groups[group])
                del self.begun[group]

    def _fill(self, now: float) -> None:
        if not self.running and not self.waiting:
            self.sampler = self._newest()
        assigned = min((self._newest() + self.bound + 1) * GROUPS, len(self.groups))
        while len(self.running) < self.places:
            if not self.waiting:
                if self.sampler < self._newest() or len(self.begun) == assigned:
                    return
                group = self.queue.popleft()
                self.begun[group] = self.sampler
                self.waiting.extend((group, seconds) for seconds in self.groups[group])
            group, seconds = self.waiting.popleft()
            number = next(self.numbers)
            self.running[number] = group
            heapq.heappush(self.events, (now + seconds, number))

    def _take(self) -> None:
        """Give groups that have ended to the steps that may be filled, by the rule of `tasks.rollout.stream`."""
        last = min(self._newest() + self.bound + 1, len(self.groups) // GROUPS) * GROUPS
        while len(self.taken) < last:
            group = next((each for each in self.ended if self._fits(each)), None)
            if group is None:
                return
            self.ended.remove(group)
            self.taken.append(group)

    def _fits(self, group: int) -> bool:
        step, left = len(self.taken) // GROUPS, GROUPS - len(self.taken) % GROUPS
        taken = {*self.taken}
        dues = [version + self.bound for each, version in self.begun.items() if each not in taken]
        return all(
            sum(each <= due for each in dues) < left + (due - step) * GROUPS
            for due in range(step, self.begun[group] + self.bound)
        )


def outcome(bound: int, groups: Groups, places: int, learner: float, update: str = "wait") -> Outcome:
    """Return how a run goes with values of `rollout.max_off_policy_steps` and `rollout.weight_update`."""
    if bound > 1:
        return StreamModel(groups, bound, places, learner, update).run()
    return run_in_steps(groups, bool(bound), places, learner)


def draw(kind: str, seed: int, steps: int = STEPS) -> Groups:
    """Return the rollouts of a run, drawn from a distribution of lengths."""
    chance = random.Random(seed)
    return [[LENGTHS[kind](chance) for _ in range(GROUP_SIZE)] for _ in range(steps * GROUPS)]


SIDES = [(0, "wait"), (1, "wait"), *((bound, update) for bound in (2, 4) for update in ("wait", "keep", "abort"))]
PLACES = {"as many places as a step has rollouts": GROUPS * GROUP_SIZE, "half as many": GROUPS * GROUP_SIZE // 2}


def main() -> None:
    """Print the tables: seconds a step, and the share of places that had a rollout."""
    names = [f"n = {bound}{f', {update}' if bound > 1 else ''}" for bound, update in SIDES]
    for label, places in PLACES.items():
        print(f"\n{label.capitalize()}:\n\n| rollouts | learner | " + " | ".join(names) + " |")
        print("|---|---|" + "---|" * len(names))
        for kind, learner in product(LENGTHS, (1.0, 4.0)):
            cells = []
            for bound, update in SIDES:
                found = [outcome(bound, draw(kind, seed), places, learner, update) for seed in range(SEEDS)]
                seconds, busy = mean(each.seconds for each in found) / STEPS, mean(each.busy for each in found)
                cells.append(f"{seconds:.1f} s, {busy:.0%}")
            print(f"| {kind} | {learner:g} s | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

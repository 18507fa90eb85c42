"""Race: a run of a sweep beside the others with its seed; it is ended early once it is worse than one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import pyarrow as pa

from configs.run import RunConfig
from flows.cli.arguments import UsageError
from flows.orchestration.server import current_flow_run, request_cancellation
from flows.queries.scores import scored_evaluations
from flows.queries.store_reader import StoreReader
from storage.store import open_store
from tasks.evaluation.confidence import LEVEL
from tasks.evaluation.stage import Difference, paired_differences

MIN_EXAMPLES = 8
"""Of fewer examples, Student's quantile of high levels is not known well enough: they end no run."""


def race_level(num_runs: int, num_looks: int) -> float:
    """Return the level of each interval of a race: 1 - 0.05 / (looks x pairs of runs).

    So the intervals of all pairs at all looks hold at once in 95 % of races (Bonferroni): in at most 5 % a run is ended
    that is no worse than the one that it lost to.
    """
    return 1 - (1 - LEVEL) / (num_looks * comb(num_runs, 2))


def is_worse(changes: Sequence[Difference]) -> bool:
    """Tell whether every interval of some differences lies below 0, and there are any."""
    clear = [change.num_examples >= MIN_EXAMPLES and change.interval for change in changes]
    return bool(clear) and all(interval and interval.high < 0 for interval in clear)


@dataclass(frozen=True)
class Race:
    """A run that is compared with the others of its seed whenever it was evaluated: at their newest common policy."""

    store: str
    run: str
    runs: tuple[str, ...]
    """All of the seed."""
    level: float

    def loss(self) -> str:
        """Return in words whom the run has lost to, by the evaluations that are recorded; empty if to nobody.

        It has lost where its policy's paired difference to a rival's is below 0, with its interval, in every held-out
        set and environment of that policy.
        """
        reader = StoreReader(open_store(self.store))
        names = [name for name in self.runs if reader.store.runs.last(name)]
        scores = {name: _traces(reader, name) for name in names}
        run = scores.pop(self.run, {})
        for name, rival in scores.items():
            common = run.keys() & rival.keys()
            tables = [(rival[place], run[place]) for place in common if place[0] == max(common)[0]]
            if is_worse([change for pair in tables for change in paired_differences(*pair, (), level=self.level)]):
                return f"policy {max(common)[0]} is worse than that of {name} on held-out examples"
        return ""

    def watch(self, num_steps: int, event: str, facts: Mapping[str, Any]) -> None:
        """Have Prefect cancel the run after an evaluation, if it has lost and is not at its end."""
        going = event == "evaluation" and facts["version"] < num_steps
        if going and (flow_run := current_flow_run()) and (reason := self.loss()):
            request_cancellation(flow_run, reason)


def _traces(reader: StoreReader, run: str) -> dict[tuple[int, str], pa.Table]:
    return {(one.version, one.set_name): scores.traces for one, scores in scored_evaluations(reader, run)}


def races(configs: Sequence[RunConfig]) -> dict[str, Race]:
    """Return the race of each run, with the others of its seed. Raises UsageError where nothing will be compared."""
    of_seeds = {config.seed: tuple(other.name for other in configs if other.seed == config.seed) for config in configs}
    num_runs, looks = len(configs) // len(of_seeds), max(map(_num_looks, configs))
    if num_runs < 2 or not looks:
        raise UsageError("--stop-losers compares evaluations of several combinations: set evaluation.every, and --over")
    level = race_level(num_runs, looks)
    return {config.name: Race(config.store, config.name, of_seeds[config.seed], level) for config in configs}


def _num_looks(config: RunConfig) -> int:
    sets = config.evaluation.of_sets().values()
    return sum(any(each.due(version) for each in sets) for version in range(config.steps + 1))

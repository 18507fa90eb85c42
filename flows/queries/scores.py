"""Scores: what the rollouts of an evaluation say of a policy, fresh or recorded, and how two policies differ."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from configs.environments import EnvironmentConfig
from configs.run import RunConfig, content
from storage.keys import canonical_json
from storage.refs import Entry
from storage.store import Store
from tasks.arrays.seats import COLUMNS as OF_SEATS
from tasks.arrays.seats import evaluated_seats
from tasks.assignment.evaluation_retries import latest_attempts
from tasks.evaluation.stage import COLUMNS, estimates, paired_differences
from tasks.stages import EVALUATION_ASSIGNMENT, ROLLOUT, scores_policy

READ = tuple(dict.fromkeys((*COLUMNS, *OF_SEATS, "episode_id")))
"""The columns of traces that `scored` reads."""


@dataclass(frozen=True)
class EvaluationScores:
    """One policy on one set."""

    described: dict[str, Any]
    """`version`, `set` (its name, empty for the one without), and `scores`, one for each environment."""
    traces: pa.Table
    """The rollouts that were counted, by which it can be compared with another."""
    pass_at: tuple[int, ...]
    all_seats: pa.Table
    """The rollouts of all who took part."""

    def of(self, counted: pa.Table) -> list[dict[str, Any]]:
        """Return the scores of some of the rollouts alone, one for each environment."""
        return [asdict(each) for each in estimates(counted, self.pass_at)]


def score_rollouts(
    name: str,
    version: int,
    rounds: Sequence[pa.Table],
    environments: Iterable[EnvironmentConfig],
    pass_at: tuple[int, ...],
) -> EvaluationScores:
    """Return what the rollouts of a set, in rounds, say of the policy of a version."""
    all_seats = latest_attempts([each.select(list(READ)) for each in rounds])
    counted = evaluated_seats(all_seats, environments)
    scores = [asdict(each) for each in estimates(counted, pass_at, took_part=all_seats)]
    return EvaluationScores({"version": version, "set": name, "scores": scores}, counted, pass_at, all_seats)


def compare_scores(before: EvaluationScores, after: EvaluationScores) -> list[dict[str, Any]]:
    """Return how the figures of two policies on a set differ, over the same examples, as plain values."""
    versions = {"set": before.described["set"], "versions": [each.described["version"] for each in (before, after)]}
    return [{**versions, **asdict(each)} for each in paired_differences(before.traces, after.traces, before.pass_at)]


def comparisons(found: Sequence[EvaluationScores]) -> list[dict[str, Any]]:
    """Return how the last policy of each set differs from the first; nothing of sets that only one was tried on."""
    by_set: dict[str, list[EvaluationScores]] = {}
    for each in found:
        by_set.setdefault(each.described["set"], []).append(each)
    return [row for own in by_set.values() if len(own) > 1 for row in compare_scores(own[0], own[-1])]


@dataclass(frozen=True)
class RecordedEvaluation:
    """An evaluation that a run recorded: a policy on a set, in the rounds that errors were made again in."""

    set_name: str
    version: int
    policy_key: str
    """Empty where someone else's model was evaluated."""
    assigned: Entry | None
    """Which examples were tried; None where that is not in the ledger any more."""
    rounds: tuple[Entry, ...]
    pass_at: tuple[int, ...]

    def scored(self, store: Store, config: RunConfig) -> EvaluationScores:
        """Return what its rollouts say."""
        tables = [store.read(each.slices("traces"), list(READ)) for each in self.rounds]
        return score_rollouts(self.set_name, self.version, tables, config.environments, self.pass_at)


def recorded_evaluations(store: Store, run: str, config: RunConfig) -> list[RecordedEvaluation]:
    """Return the evaluations that a run recorded or shares, by version and set."""
    entries = [each for each in store.ledger.entries(run=run) if not each.part]
    assigned = {each.key: each for each in entries if each.stage == EVALUATION_ASSIGNMENT}
    rounds: dict[tuple[str, str], dict[int, Entry]] = {}
    for each in entries:
        if each.stage == ROLLOUT and scores_policy(each.inputs):
            first, number = _first_round(assigned, each.inputs[EVALUATION_ASSIGNMENT])
            rounds.setdefault((each.inputs.get("policy", ""), first), {})[number] = each
    names = {canonical_json(content(each)): name for name, each in reversed(config.evaluation.of_sets().items())}
    found = [
        _recorded(config, names, policy, assigned.get(first), [own[number] for number in sorted(own)])
        for (policy, first), own in rounds.items()
    ]
    order = list(config.evaluation.of_sets())
    return sorted(found, key=lambda each: (each.version, order.index(each.set_name) if each.set_name in order else -1))


def _first_round(assigned: Mapping[str, Entry], key: str) -> tuple[str, int]:
    """Return the assignment that one which makes errors again goes back to, and its number among the rounds."""
    number = 0
    while key in assigned and EVALUATION_ASSIGNMENT in assigned[key].inputs:
        key, number = assigned[key].inputs[EVALUATION_ASSIGNMENT], number + 1
    return key, number


def _recorded(
    config: RunConfig, names: Mapping[str, str], policy: str, assigned: Entry | None, rounds: Sequence[Entry]
) -> RecordedEvaluation:
    said = assigned.section.get("evaluation") if assigned else None
    name = names.get(canonical_json(said), "") if said is not None else ""
    pass_at = config.evaluation.of_sets().get(name, config.evaluation).pass_at
    return RecordedEvaluation(name, rounds[0].step, policy, assigned, tuple(rounds), pass_at)

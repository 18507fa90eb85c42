"""Scores: what the rollouts of an evaluation say of a policy, fresh or recorded, and how two policies differ."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from configs.environments import EnvironmentConfig
from configs.run import RunConfig, content
from flows.queries.store_reader import StoreReader
from storage.keys import canonical_json
from storage.read.lineage import row_identities
from storage.refs import Entry
from storage.store import Store
from tasks.arrays.seats import COLUMNS as OF_SEATS
from tasks.arrays.seats import evaluated_seats
from tasks.assignment.stage import latest_attempts
from tasks.evaluation.stage import COLUMNS, estimates, paired_differences
from tasks.stages import EVALUATION_ASSIGNMENT, ROLLOUT, scores_policy

READ = tuple(dict.fromkeys((*COLUMNS, *OF_SEATS, "episode_id")))
"""The columns of traces that `scored` reads."""


@dataclass(frozen=True)
class EvaluationScores:
    """One policy on one set."""

    set_name: str
    """Empty for the set without a name."""
    version: int
    traces: pa.Table
    """The rollouts that were counted, by which it can be compared with another."""
    pass_at: tuple[int, ...]
    pass_reward: float
    all_seats: pa.Table
    """The rollouts of all who took part."""

    @cached_property
    def described(self) -> dict[str, Any]:
        """`version`, `set` (its name), and `scores`, one for each environment: made when they are asked for."""
        scores = [asdict(each) for each in estimates(self.traces, self.pass_at, self.pass_reward, self.all_seats)]
        return {"version": self.version, "set": self.set_name, "scores": scores}

    def of(self, counted: pa.Table) -> list[dict[str, Any]]:
        """Return the scores of some of the rollouts alone, one for each environment."""
        return [asdict(each) for each in estimates(counted, self.pass_at, self.pass_reward)]


def score_rollouts(
    name: str,
    version: int,
    rounds: Sequence[pa.Table],
    environments: Iterable[EnvironmentConfig],
    pass_at: tuple[int, ...],
    pass_reward: float,
) -> EvaluationScores:
    """Return what the rollouts of a set, in rounds, say of the policy of a version."""
    all_seats = latest_attempts([each.select(list(READ)) for each in rounds])
    counted = evaluated_seats(all_seats, environments)
    return EvaluationScores(name, version, counted, pass_at, pass_reward, all_seats)


def compare_scores(before: EvaluationScores, after: EvaluationScores) -> list[dict[str, Any]]:
    """Return how the figures of two policies on a set differ, over the same examples, as plain values."""
    versions = {"set": before.set_name, "versions": [each.version for each in (before, after)]}
    changes = paired_differences(before.traces, after.traces, before.pass_at, before.pass_reward)
    return [{**versions, **asdict(each)} for each in changes]


def comparisons(found: Sequence[EvaluationScores]) -> list[dict[str, Any]]:
    """Return how the last policy of each set differs from the first; nothing of sets that only one was tried on."""
    by_set: dict[str, list[EvaluationScores]] = {}
    for each in found:
        by_set.setdefault(each.set_name, []).append(each)
    return [row for own in by_set.values() if len(own) > 1 for row in compare_scores(own[0], own[-1])]


def mixed_policies(store: Store, run: str) -> str:
    """Return a line that names the runs whose policies an evaluation scored; empty where they are of one run."""
    configs = [event.config for event in store.runs.events(run) if event.kind == "evaluate"]
    policies = [config.get("evaluation", {}).get("policy", "") for config in configs]
    makers = sorted({policy.partition(":")[0] for policy in policies if policy})
    if len(makers) < 2:
        return ""
    return f"{run} scored policies of {len(makers)} runs ({', '.join(makers)}): differences are between runs"


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
    pass_reward: float

    def scores_in(self, store: Store, config: RunConfig) -> EvaluationScores:
        """Return what its rollouts say."""
        rounds = [store.read(entry.slices("traces"), list(READ)) for entry in self.rounds]
        environments, passing = config.served_environments.values(), (self.pass_at, self.pass_reward)
        return score_rollouts(self.set_name, self.version, rounds, environments, *passing)


def recorded_evaluations(store: Store, run: str, config: RunConfig) -> list[RecordedEvaluation]:
    """Return the evaluations that a run recorded or shares, by version and set."""
    entries = [each for each in store.ledger.entries(run=run) if not each.part]
    assigned = {each.key: each for each in entries if each.stage == EVALUATION_ASSIGNMENT}
    rounds: dict[tuple[str, str], dict[int, Entry]] = {}
    for each in entries:
        # Rounds that try errors again are one evaluation: they go back to the same first assignment.
        if each.stage == ROLLOUT and scores_policy(each.inputs):
            first, number = first_round(assigned, each.inputs[EVALUATION_ASSIGNMENT])
            rounds.setdefault((each.inputs.get("policy", ""), first), {})[number] = each
    found = []
    for (policy, first), by_number in rounds.items():
        name, own = set_name(config, assigned.get(first)), tuple(by_number[number] for number in sorted(by_number))
        settings = config.evaluation.of_sets().get(name, config.evaluation)
        passing = settings.pass_at, settings.pass_reward
        found.append(RecordedEvaluation(name, own[0].step, policy, assigned.get(first), own, *passing))
    # A set that the config does not name any more, as it was changed on a resume, comes first.
    order = list(config.evaluation.of_sets())
    return sorted(found, key=lambda each: (each.version, order.index(each.set_name) if each.set_name in order else -1))


def first_round(assigned: Mapping[str, Entry], key: str) -> tuple[str, int]:
    """Return the assignment that one which makes errors again goes back to, and its number among the rounds.

    `assigned` are the assignments of evaluations, by key.
    """
    number = 0
    while key in assigned and EVALUATION_ASSIGNMENT in assigned[key].inputs:
        key, number = assigned[key].inputs[EVALUATION_ASSIGNMENT], number + 1
    return key, number


def set_name(config: RunConfig, assigned: Entry | None) -> str:
    """Return the name of the set whose examples were assigned; empty for the one without, and where it is not known."""
    said = assigned and assigned.section.get("evaluation")
    sets = config.evaluation.of_sets().items() if said is not None else ()
    return next((name for name, own in sets if canonical_json(content(own)) == canonical_json(said)), "")


def scored_evaluations(
    reader: StoreReader, run: str, version: int | None = None
) -> list[tuple[RecordedEvaluation, EvaluationScores]]:
    """Return the evaluations of a run, or of its policy of a version, with what they say. Raises NotThere.

    What was read once is held: only the columns that scores need are read.
    """
    config, works = reader.config(run), reader.graph.works
    # Scores come of the rollouts, and of what the config, another one after a resume, says of seats and passes.
    seats = tuple(environment.model_dump_json() for environment in config.served_environments.values())

    def scores(entry: RecordedEvaluation) -> EvaluationScores:
        passing = entry.pass_at, entry.pass_reward
        name = "evaluation", entry.set_name, entry.version, row_identities(entry.rounds), passing, seats
        return reader.cache.once(name, lambda: entry.scores_in(reader.store, config))

    return [
        (entry, scores(entry))
        for entry in recorded_evaluations(reader.store, run, config)
        # The ledger may have more than the moment that is looked at: the store moves on.
        if version in (None, entry.version) and all(one.key in works for one in entry.rounds)
    ]


def held_out(reader: StoreReader, run: str) -> list[dict[str, Any]]:
    """Return the evaluations of a run as `stagecoach show` does: `version`, `set` and `scores`. Raises NotThere."""
    done = row_identities(work for work in reader.history(run).evaluations if work.finished)
    if not done:
        return []
    name = ("held-out", run, len(reader.store.runs.events(run)), done)  # each event may bring another config
    # Held apart from the rollouts, which weigh much: these may leave the memory while a list of runs is looked at.
    return reader.cache.once(name, lambda: [scores.described for _, scores in scored_evaluations(reader, run)])

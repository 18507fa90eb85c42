"""Assignment: which examples a step tries, in which groups, with which seeds.

Reads examples, of earlier batches of a step assignments, stale groups that are replaced, and where the sampler goes by
how hard examples are, traces and difficulties of a step before; writes assignments, and difficulties where the sampler
has any.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count as counting
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from configs.environments import EnvironmentConfig
from configs.run import View
from storage.schemas.stage_tables import ASSIGNMENTS
from tasks.arrays.columns import rows_with, rows_without, texts, with_column
from tasks.arrays.group_counts import num_begun, oversampled_turn
from tasks.arrays.permutation import digest, shares, turns
from tasks.assignment.examples import having
from tasks.assignment.samplers import SAMPLERS
from tasks.assignment.samplers.sampler import SampleRequest, known_difficulties, rewards_by_environment
from tasks.runtime.prefect_task import as_task
from tasks.runtime.stage import Attempt, Stage, Tables


class TooFewExamples(ValueError):
    """There is no environment, or one has no examples of a split, or fewer than were asked for."""


@dataclass(frozen=True)
class BatchRequest:
    """Which batch of a step is assigned, and how many groups it has."""

    batch: int = 0
    """0 for the first of the step."""
    groups: Mapping[str, int] | None = None
    """Groups of a further batch by environment; None for as many as a step has."""
    replaces: int = 0
    """Groups in place of stale ones, of the first of these in order."""
    keeps_examples: bool = False
    """Whether replacements have the examples of the groups that they replace."""


@dataclass(frozen=True)
class AssignmentInputs:
    """The examples, and what earlier batches and steps recorded."""

    examples: pa.Table
    step: int
    request: BatchRequest = field(default_factory=BatchRequest)
    assignments: pa.Table | None = None
    """Of earlier batches of the step."""
    traces: pa.Table | None = None
    difficulties: pa.Table | None = None
    stale_groups: pa.Table | None = None

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        request: BatchRequest = attempt.parameters or BatchRequest()
        read = attempt.optional_table
        before = read("assignments"), read("traces"), read("difficulties"), read("stale_groups")
        return cls(attempt.table("examples"), attempt.step, request, *before)


def assignment(inputs: AssignmentInputs, config: View) -> Tables:
    """Return the rollouts of one training step: `groups_per_step` groups of `group_size` members.

    Groups go to environments by weight, exactly over the run; the sampler says which examples each environment tries.
    With `oversampling` more groups of each environment are begun than the step needs.
    Further batches of a step are drawn when the previous ones leave too little to train on: other examples as long as
    there are any, and other seeds, without advancing the sampler's epoch. A sampler that goes by how hard examples are
    also makes `difficulties`, where traces came in. Raises TooFewExamples if an environment
    has no examples of split train, and DifficultiesMissing where such a sampler has lost its state.
    """
    settings, environments = config.assignment, _environments(config)
    step, request, batch = inputs.step, inputs.request, inputs.request.batch
    start = step * settings.groups_per_step
    slots = _slots(environments, start, settings.groups_per_step, request.groups)
    replaced = []
    if request.replaces:
        assert inputs.stale_groups is not None, "a replacement has an input with stale groups"
        replaced = _stale_groups(inputs.stale_groups, request.replaces)
        slots = [(row["environment"], start + place) for place, row in enumerate(replaced)]
    elif settings.oversampling > 1:
        slots = _oversample(slots, settings.oversampling)
    examples = {each.name: _examples(inputs.examples, each.name, "train", wanted=1) for each in environments}
    state = None
    if settings.sampler.stateful:
        state = known_difficulties(inputs.difficulties, inputs.traces, step, batch, config.drawn_by_learners)
    tried = inputs.assignments if batch and inputs.assignments is not None else ASSIGNMENTS.arrow.empty_table()
    rewards = {} if state is None else rewards_by_environment(state)
    chosen: dict[str, Iterator[str]] = {}
    for name in examples:
        turns_of = [turn for each, turn in slots if each == name]
        seen = frozenset(texts(tried.filter(pc.field("environment") == name)["example_id"]))
        asked = SampleRequest(name, examples[name], turns_of, config.seed, step, batch, seen, rewards.get(name, {}))
        chosen[name] = iter(SAMPLERS[settings.sampler.type](asked, settings, settings.sampler))
    if request.keeps_examples:
        chosen = {name: iter([row["example_id"] for row in replaced if row["environment"] == name]) for name in chosen}
    prefix = f"{step}.{batch}" if batch else f"{step}"
    drawn = [(f"{prefix}-{slot}", name, next(chosen[name])) for slot, (name, _) in enumerate(slots)]
    made = {"assignments": _rollouts(drawn, settings.group_size, config.seed)}
    # Within a step nothing new is known: its first batch has written the state, which later ones read.
    if state is not None and (not batch or inputs.traces is not None):
        made["difficulties"] = state
    return made


def _stale_groups(groups: pa.Table, count: int) -> list[dict[str, str]]:
    """Return environment and example of the first of some groups, in order of their ids."""
    rows = groups.sort_by("group_id").slice(0, count)
    return rows.select(["environment", "example_id"]).to_pylist()


def _slots(
    environments: Sequence[EnvironmentConfig], start: int, count: int, groups: Mapping[str, int] | None
) -> list[tuple[str, int]]:
    """Return environment and turn of each group of a batch, in order; `groups` cuts the step's slots short."""
    whole = shares([environment.weight for environment in environments])
    slots = [(environments[turn].name, had) for turn, had in turns(whole, start, count)]
    if groups is None:
        return slots
    left = Counter(groups)
    kept = []
    for name, had in slots:
        if left[name] > 0:
            left[name] -= 1
            kept.append((name, had))
    return kept


def _oversample(slots: Sequence[tuple[str, int]], factor: float) -> list[tuple[str, int]]:
    """Return the slots and, after them, those of the groups that each environment begins beyond what it needs.

    An environment orders that much faster, so that no step tries again what another one has begun.
    """
    needed = Counter(name for name, _ in slots)
    first = {name: min(had for each, had in slots if each == name) for name in needed}
    # From where the environment would stand had every step before been oversampled as well.
    orders = {name: counting(oversampled_turn(had, factor)) for name, had in first.items()}
    more = [name for name, count in needed.items() for _ in range(num_begun(count, factor) - count)]
    return [(name, next(orders[name])) for name in [*(name for name, _ in slots), *more]]


@dataclass(frozen=True)
class EvaluationInputs:
    """The examples; for a retry also the assignments and traces of the evaluation so far."""

    examples: pa.Table
    assignments: pa.Table | None = None
    traces: pa.Table | None = None

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        before = attempt.optional_table("assignments"), attempt.optional_table("traces")
        return cls(attempt.table("examples"), *before)


def evaluation_assignment(inputs: EvaluationInputs, config: View) -> Tables:
    """Return the rollouts of an evaluation: of each environment the first `num_examples` held-out ones in hash order.

    Of an environment that is never trained on, all of whose examples are held out, it is at most so many.

    The order does not depend on the run's seed, so that evaluations of different runs try the same examples; the
    examples that a filter chooses come in the same order. Where rollouts of such assignments come in, those that ended
    with an error are assigned once more, with another seed. Raises TooFewExamples if an environment holds out too few,
    and FieldMissing where a filter names a field that examples lack.
    """
    if inputs.traces is not None:
        assert inputs.assignments is not None, "a retry has the assignments that it repeats"
        return {"assignments": _again(inputs.assignments, errored_assignments(inputs.traces))}
    settings = config.evaluation
    groups = []
    for environment in _environments(config):
        name = environment.name
        if settings.environments and name not in settings.environments:
            continue
        fitting = having(inputs.examples, name, "eval", settings.where) if settings.where else inputs.examples
        wanted = settings.num_examples if environment.holdout_fraction < 1 else 1
        held_out = _examples(fitting, name, "eval", wanted)
        in_hash_order = sorted(held_out, key=lambda example: (digest("held out", name, example), example))
        chosen = in_hash_order[: settings.num_examples]
        groups += [(f"eval-{name}-{i}", name, example) for i, example in enumerate(chosen)]
    return {"assignments": _rollouts(groups, settings.attempts, config.seed)}


def _again(assignments: pa.Table, chosen: Sequence[str]) -> pa.Table:
    """Return the chosen assignments with other seeds, each made of the one before."""
    rows = rows_with(assignments, "assignment_id", chosen)
    seeds = pa.array([digest("again", seed) >> 1 for seed in rows["seed"].to_pylist()], pa.int64())
    return with_column(rows, "seed", seeds)


def _environments(config: View) -> Sequence[EnvironmentConfig]:
    if not config.environments:
        raise TooFewExamples("the config names no environment, so there is nothing to try. Add one to `environments`.")
    found: Sequence[EnvironmentConfig] = config.environments
    return found


def _examples(examples: pa.Table, environment: str, split: str, wanted: int) -> list[str]:
    """Return the ids of an environment's examples of a split, in table order; raise unless enough, each once."""
    own = examples.filter(pc.field("environment") == environment)
    found = texts(own.filter(pc.field("split") == split)["example_id"])
    if len(found) < wanted:
        raise TooFewExamples(
            f"environment {environment!r} has {len(found)} examples of split {split!r} (of {own.num_rows} in all), but "
            f"{wanted} are wanted. Nothing was sampled. {_remedy(split, wanted)}"
        )
    doubled = [example for example, count in Counter(found).items() if count > 1]
    assert not doubled, f"environment {environment!r} names example {doubled[0]!r} twice: ids are durable and unique"
    return found


def _remedy(split: str, wanted: int) -> str:
    if split == "eval" and wanted == 1:
        return "See whether its taskset is empty, and whether a filter (where) fits any example."
    if split == "train":
        return "Lower the environment's holdout_fraction, raise its max_examples, or see whether its taskset is empty."
    return "Lower evaluation.num_examples, or raise holdout_fraction or max_examples of the environment."


def _rollouts(groups: Iterable[tuple[str, str, str]], group_size: int, seed: int) -> pa.Table:
    """Return `group_size` rows for each (group id, environment, example id), each with a 63-bit seed of its own."""
    rows = [
        {
            "assignment_id": f"{group}/{member}",
            "group_id": group,
            "member": member,
            "environment": environment,
            "example_id": example,
            # Tables hold signed numbers of 64 bits, and a seed is not negative.
            "seed": digest("sampling", seed, group, member) >> 1,
        }
        for group, environment, example in groups
        for member in range(group_size)
    ]
    return pa.Table.from_pylist(rows, schema=ASSIGNMENTS.arrow)


def latest_attempts(rounds: Sequence[pa.Table]) -> pa.Table:
    """Return traces in which those of an assignment that was made again take the place of its earlier ones.

    `rounds` are in order of time, each with the column `assignment_id`.
    """
    kept = list(rounds[:1])
    for later in rounds[1:]:
        kept = [rows_without(rows, "assignment_id", later["assignment_id"]) for rows in kept]
        kept.append(later)
    return pa.concat_tables(kept)


def errored_assignments(traces: pa.Table) -> list[str]:
    """Return the assignments of which any trace ended with an error, in order."""
    return sorted(set(texts(traces.filter(pc.is_valid(traces["error_class"]))["assignment_id"])))


STAGE = Stage(
    name="assignment",
    version=1,
    reads=("examples",),
    writes=("assignments", "difficulties"),
    sections=("seed", "assignment", "environments", "drawn_by_learners"),
    read_inputs=AssignmentInputs.read,
    function=assignment,
    optional=("assignments", "traces", "difficulties", "stale_groups"),
)
EVALUATION_STAGE = Stage(
    name="evaluation_assignment",
    version=1,
    reads=("examples",),
    writes=("assignments",),
    sections=("seed", "evaluation", "environments"),
    read_inputs=EvaluationInputs.read,
    function=evaluation_assignment,
    optional=("assignments", "traces"),
)
task = as_task(STAGE)
evaluation_task = as_task(EVALUATION_STAGE)

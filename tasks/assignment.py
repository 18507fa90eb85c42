"""Assignment: which examples a step tries, in which groups, with which seeds.

Reads examples; writes assignments.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from configs.sections import EnvironmentConfig
from storage.schemas import ASSIGNMENTS
from tasks.columns import texts
from tasks.stage import Stage, Tables, as_task
from tasks.walk import digest, permutation, shares, turns


class TooFewExamples(ValueError):
    """There is no environment, or one has no examples of a split, or fewer than were asked for."""


def assignment(tables: Tables, config: View, *, step: int, batch: int = 0) -> Tables:
    """Return the rollouts of one training step: `groups_per_step` groups of `group_size` members.

    Groups go to environments by weight, exactly over the run; each environment walks its train examples in epochs.
    `batch` numbers further batches for the same step, drawn when the filters left nothing of the one before: other
    examples (the same ones if `shuffle` is off) and other seeds, without moving the walk of the steps to come.
    Raises TooFewExamples if an environment has no examples of split train.
    """
    settings, environments = config.assignment, _environments(config)
    names = [environment.name for environment in environments]
    examples = {name: _examples(tables["examples"], name, "train", wanted=1) for name in names}
    weights = shares([environment.weight for environment in environments])
    orders: dict[tuple[str, int], Sequence[int]] = {}
    groups = []
    for slot, (turn, had) in enumerate(turns(weights, step * settings.groups_per_step, settings.groups_per_step)):
        name = names[turn]
        epoch, place = divmod(had, len(examples[name]))
        if (name, epoch) not in orders:
            orders[name, epoch] = _order(len(examples[name]), settings.shuffle, (config.seed, name, epoch, batch))
        group = f"{step}-{slot}" if batch == 0 else f"{step}.{batch}-{slot}"
        groups.append((group, name, examples[name][orders[name, epoch][place]]))
    return {"assignments": _rollouts(groups, settings.group_size, config.seed)}


def evaluation_assignment(tables: Tables, config: View) -> Tables:
    """Return the rollouts of an evaluation: of each environment the first `num_examples` held-out ones in hash order.

    The order does not depend on the run's seed, so that evaluations of different runs try the same examples. Raises
    TooFewExamples if an environment holds out fewer than `num_examples`.
    """
    settings = config.evaluation
    groups = []
    for environment in _environments(config):
        name = environment.name
        held_out = _examples(tables["examples"], name, "eval", wanted=settings.num_examples)
        chosen = _in_hash_order(name, held_out)[: settings.num_examples]
        groups += [(f"eval-{name}-{i}", name, example) for i, example in enumerate(chosen)]
    return {"assignments": _rollouts(groups, settings.attempts, config.seed)}


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
            f"{wanted} are wanted. Nothing was sampled. {_remedy(split)}"
        )
    doubled = [example for example, count in Counter(found).items() if count > 1]
    assert not doubled, f"environment {environment!r} names example {doubled[0]!r} twice: ids are durable and unique"
    return found


def _remedy(split: str) -> str:
    if split == "train":
        return "Lower the environment's holdout_fraction, raise its max_examples, or see whether its taskset is empty."
    return "Lower evaluation.num_examples, or raise holdout_fraction or max_examples of the environment."


def _in_hash_order(environment: str, examples: list[str]) -> list[str]:
    return sorted(examples, key=lambda example: (digest("held out", environment, example), example))


def _order(count: int, shuffle: bool, seed: tuple[object, ...]) -> Sequence[int]:
    return permutation(count, digest("order", *seed)).tolist() if shuffle else range(count)


def _rollouts(groups: Iterable[tuple[str, str, str]], group_size: int, seed: int) -> pa.Table:
    """Return `group_size` rows for each (group id, environment, example id), each with a 63-bit seed of its own."""
    columns: dict[str, list[object]] = defaultdict(list)
    for group, environment, example in groups:
        for member in range(group_size):
            columns["assignment_id"].append(f"{group}/{member}")
            columns["group_id"].append(group)
            columns["member"].append(member)
            columns["environment"].append(environment)
            columns["example_id"].append(example)
            columns["seed"].append(digest("sampling", seed, group, member) >> 1)
    return pa.table({name: columns[name] for name in ASSIGNMENTS.arrow.names}, schema=ASSIGNMENTS.arrow)


STAGE = Stage(
    name="assignment",
    version=1,
    reads=("examples",),
    writes=("assignments",),
    sections=("seed", "assignment", "environments"),
    function=assignment,
    needs=("step", "batch"),
)
EVALUATION_STAGE = Stage(
    name="evaluation_assignment",
    version=1,
    reads=("examples",),
    writes=("assignments",),
    sections=("seed", "evaluation", "environments"),
    function=evaluation_assignment,
)
task = as_task(STAGE)
evaluation_task = as_task(EVALUATION_STAGE)

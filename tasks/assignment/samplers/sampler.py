"""What a sampler is asked for, and how hard every example was for the policy when it was tried last."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.environments import SeatRule
from configs.sections import AssignmentConfig
from storage.schemas.stage_tables import DIFFICULTIES
from tasks.arrays.seats import NO_RULES, trained_seats


@dataclass(frozen=True)
class SampleRequest:
    """The examples that one batch of a step wants of one environment."""

    environment: str
    examples: Sequence[str]
    """All that there are, in table order, each once."""
    turns: Sequence[int]
    """Which turns of the environment these are, counted over the whole run: one example for each."""
    seed: int
    step: int
    batch: int
    taken: Set[str]
    """Examples that the step has tried in earlier batches; others come first."""
    difficulties: Mapping[str, float]
    """The mean reward of the last group of each example that was scored."""


Sampler = Callable[[SampleRequest, AssignmentConfig, Any], list[str]]
"""Returns an example for each turn, under the assignment section and the sampler's own."""


class DifficultiesMissing(ValueError):
    """A sampler goes by how hard examples were, and what was known after the step before is not there."""


def known_difficulties(
    difficulties: pa.Table | None,
    traces: pa.Table | None,
    step: int,
    batch: int,
    rules: Mapping[str, SeatRule] = NO_RULES,
) -> pa.Table:
    """Return what is known after the traces that came in; nothing at the first batch of a run.

    `rules` are as in `update_difficulties`. Raises DifficultiesMissing where something must be known and is not.
    """
    if step == batch == 0:
        return DIFFICULTIES.arrow.empty_table()
    if difficulties is None:
        raise DifficultiesMissing(
            f"table difficulties: the sampler goes by how hard examples were, and what was known before step {step}, "
            f"batch {batch}, was not recorded. Nothing was assigned: a cold start would look healthy and be another "
            "curriculum. All that was sampled is safe. Begin at step 0 (a run under a new name; replay: without "
            "--steps), or choose assignment.sampler.type=standard."
        )
    return difficulties if traces is None else update_difficulties(difficulties, traces, rules)


def update_difficulties(before: pa.Table, traces: pa.Table, rules: Mapping[str, SeatRule] = NO_RULES) -> pa.Table:
    """Return the difficulties after some traces, by environment and example.

    A group counts by the mean reward of its trainable traces that did not fail and were scored, without a judge's;
    where an example has several groups, the last in the order of their ids. What was not tried stays as it was. `rules`
    say of which environments the learner's rewards alone count: what its opponent wins it has lost.
    """
    rows = {(row["environment"], row["example_id"]): row for row in before.to_pylist()}
    for environment, example, reward in _groups(traces, rules):
        had = rows.get((environment, example), {"num_groups": 0})["num_groups"]
        values = (environment, example, reward, had + 1)
        rows[environment, example] = dict(zip(DIFFICULTIES.arrow.names, values, strict=True))
    return pa.Table.from_pylist([rows[each] for each in sorted(rows)], schema=DIFFICULTIES.arrow)


def rewards_by_environment(difficulties: pa.Table) -> Mapping[str, Mapping[str, float]]:
    """Return the mean rewards by environment, then by example."""
    found: dict[str, dict[str, float]] = {}
    for row in difficulties.to_pylist():
        found.setdefault(row["environment"], {})[row["example_id"]] = row["reward"]
    return found


def _groups(traces: pa.Table, rules: Mapping[str, SeatRule]) -> Iterator[tuple[str, str, float]]:
    """Yield environment, example and mean reward of each group that was scored, in the order of the groups' ids."""
    traces = trained_seats(traces, rules)  # a judge's reward is zero by construction and says nothing of the example
    scored = pc.and_(pc.is_valid(traces["reward"]), pc.is_null(traces["error_class"]))
    chosen = traces.filter(pc.and_(scored, traces["trainable"]))
    rows = chosen.select(["environment", "group_id", "example_id", "reward", "trace_id"]).to_pylist()
    for _, members in groupby(sorted(rows, key=_by_group), key=lambda row: row["group_id"]):
        group = list(members)
        yield group[0]["environment"], group[0]["example_id"], sum(row["reward"] for row in group) / len(group)


def _by_group(row: dict[str, Any]) -> tuple[int, str, str]:
    # Ids end in a number without leading zeros: the shorter one is the lower. By trace id, for sums that do not depend
    # on which rollout finished first.
    return len(row["group_id"]), row["group_id"], row["trace_id"]

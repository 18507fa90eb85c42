"""Runs to compare, in one store: twins, a replay, other seeds, other lengths, one that failed, one with nothing shared.

Rollouts that are sampled anew have ids and rewards of their own, as those of an engine have.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs.run import View
from storage.store import Store, open_store
from tasks.runtime.stage import Policy, Tables
from tests.fixtures import rehearsal, replays
from tests.fixtures.builders import stand_in

STRICT = {"filters": ({"type": "errored"}, {"type": "zero_advantage", "tolerance": 0.5})}
"""Leaves out groups whose rewards lie close together."""
FAILS_AT = 1


def sampled(tables: Tables, config: View, *, step: int, policy: Policy) -> Tables:
    """Stand in for sampling: ids and rewards go by the sampling seed and the policy."""
    made = rehearsal.sampled(tables, config, step=step, policy=policy)
    seeds = dict(zip(*(tables["assignments"][name].to_pylist() for name in ("assignment_id", "seed")), strict=True))
    traces, messages = made["traces"], made["messages"]
    names = {
        row["trace_id"]: f"{seeds[row['assignment_id']]:x}-{policy.key[:6]}"
        for row in traces.select(["trace_id", "assignment_id"]).to_pylist()
    }
    ids = [names[name] for name in traces["trace_id"].to_pylist()]
    rewards = [random.Random(name).random() for name in ids]
    traces = with_column(with_column(traces, "trace_id", ids), "reward", rewards)
    return {
        "traces": traces,
        "messages": with_column(messages, "trace_id", [names[n] for n in messages["trace_id"].to_pylist()]),
    }


def with_column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    """Return a table with other values in a column."""
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))


def failing(tables: Tables, config: View, *, step: int, key: str, policy: Policy) -> Tables:
    """Stand in for a learner that dies in the middle of a run."""
    if step == FAILS_AT:
        raise MemoryError("no room")
    return rehearsal.trained(tables, config, step=step, key=key, policy=policy)


@contextmanager
def played(**functions: Any) -> Iterator[None]:
    """Within the block, runs are played with these functions for stages."""
    with pytest.MonkeyPatch.context() as patch:
        for stage, function in functions.items():
            patch.setitem(rehearsal.STAND_INS, stage, stand_in(rehearsal.STAND_INS[stage], function))
        yield


def make(root: Path) -> Store:
    """Make the store and return it."""
    with played(rollout=sampled):
        rehearsal.rehearse(root, "base")
        rehearsal.rehearse(root, "twin", engine={"threads": 2})
        rehearsal.rehearse(root, "longer", steps=3)
        rehearsal.rehearse(root, "seeded", seed=8, steps=1)
        rehearsal.rehearse(root, "strict", steps=1, filtering=STRICT)
        rehearsal.rehearse(root, "faster", training={"learning_rate": 1e-3})
        with played(training=failing), pytest.raises(MemoryError):
            rehearsal.rehearse(root, "broken", training={"learning_rate": 1e-2})
        replays.walk(replays.ask(root, overrides=[replays.RLOO], name="credited"))
        replays.walk(replays.ask(root, overrides=[replays.RLOO], steps="1:", name="later"))
        replays.walk(
            replays.ask(root, from_stage="packing", overrides=["packing.tokens_per_row=96"], steps=":1", name="first")
        )
    return open_store(root)

"""Runs to compare, in one store: twins, a replay, other seeds, other lengths, one that failed, one with nothing shared.

Rollouts that are sampled anew have ids and rewards of their own, as those of an engine have.
"""

import random

import pytest

from storage.store import open_store
from tests.fixtures import rehearsal, replays
from tests.fixtures.builders import table

STRICT = {"filters": ({"type": "errored"}, {"type": "zero_advantage", "tolerance": 0.5})}
"""Leaves out groups whose rewards lie close together."""
RUNS = {
    "base": {},
    "twin": {"engine": {"threads": 2}},
    "longer": {"steps": 3},
    "seeded": {"seed": 8, "steps": 1},
    "strict": {"steps": 1, "filtering": STRICT},
    "faster": {"training": {"learning_rate": 1e-3}},
}
REPLAYS = {
    "credited": {"overrides": [replays.RLOO]},
    "later": {"overrides": [replays.RLOO], "steps": "1:"},
    "first": {"from_stage": "packing", "overrides": ["packing.tokens_per_row=96"], "steps": ":1"},
}
FAILS_AT = 1


def sampled(tables, config, *, step, policy):
    """Stand in for sampling: ids and rewards go by the sampling seed and the policy."""
    made = rehearsal.sampled(tables, config, step=step, policy=policy)
    seeds = {row["assignment_id"]: row["seed"] for row in tables["assignments"].to_pylist()}
    traces = made["traces"].to_pylist()
    names = {row["trace_id"]: f"{seeds[row['assignment_id']]:x}-{policy.key[:6]}" for row in traces}
    for row in (*traces, *(messages := made["messages"].to_pylist())):
        row["trace_id"] = names[row["trace_id"]]
    traces = [row | {"reward": random.Random(row["trace_id"]).random()} for row in traces]
    return {"traces": table("traces", traces), "messages": table("messages", messages)}


def failing(tables, config, *, step, key, policy):
    """Stand in for a learner that dies in the middle of a run."""
    if step == FAILS_AT:
        raise MemoryError("no room")
    return rehearsal.trained(tables, config, step=step, key=key, policy=policy)


def make(root):
    """Make the store and return it."""
    with rehearsal.play_stages(rollout=sampled):
        for name, changes in RUNS.items():
            rehearsal.rehearse(root, name, **changes)
        with rehearsal.play_stages(training=failing), pytest.raises(MemoryError):
            rehearsal.rehearse(root, "broken", training={"learning_rate": 1e-2})
        for name, asked in REPLAYS.items():
            replays.walk(replays.ask(root, name=name, **asked))
    return open_store(root)

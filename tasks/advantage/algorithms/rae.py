"""RAE, role-conditioned advantage estimation: a rollout is worth what it earned beyond a running mean of its own seat.

SPIRAL, arXiv 2506.24119, algorithm 1. There the baseline has the reward in it when it is subtracted (order `post`),
and is kept for each game and role (key `agent`).
"""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from configs.algorithms import RaeConfig
from storage.schemas.stage_tables import ESTIMATOR_STATES
from tasks.advantage.algorithms.credit import AdvantageBreach, Credit, GroupedTraces
from tasks.arrays.columns import texts

Seat = tuple[str, str, str]
"""Environment, example and agent: what has a baseline of its own. The example is empty where none is kept apart."""


def rae(kept: GroupedTraces, settings: RaeConfig) -> Credit:
    """Return A = R - b with b <- a b + (1 - a) R taken first (`post`) or after (`pre`), trace by trace as stored.

    b is the baseline of the trace's environment, example and agent, or with key `agent` of its environment and agent, 0
    before its first reward, and a is `decay`. Traces of one seat compound: each goes on from the baseline that the one
    before it left. Every sampled token has rl weight 1. A trace without a reward, which is not a reward of zero, has no
    advantage and no weight and leaves the baseline as it is. The states are those of every seat ever seen, in order of
    seat. Raises AdvantageBreach where the states were kept by the other key.
    """
    by_example = settings.key == "example"
    seats: dict[Seat, tuple[float, int]] = _baselines_of(kept.states)
    _require_key(seats, settings)
    reward = kept.traces["reward"].to_numpy()
    baseline = np.full(len(reward), np.nan)
    columns = (texts(kept.traces[name]) for name in ("environment", "example_id", "agent"))
    for row, (environment, example, agent) in enumerate(zip(*columns, strict=True)):
        seat = environment, example if by_example else "", agent
        # Row by row and not in arrays: each baseline depends on the one that the row before left.
        if np.isnan(reward[row]):
            continue
        before, count = seats.get(seat, (0.0, 0))
        after = settings.decay * before + (1 - settings.decay) * float(reward[row])
        baseline[row] = after if settings.order == "post" else before
        seats[seat] = (after, count + 1)
    return replace(Credit.of_advantages(kept, baseline, reward - baseline), states=_states(seats))


def _require_key(seats: dict[Seat, tuple[float, int]], settings: RaeConfig) -> None:
    """Raise AdvantageBreach where a baseline is of the other key: all would begin at 0 anew, and look healthy."""
    for environment, example, agent in seats:
        if bool(example) != (settings.key == "example"):
            other = "example" if example else "agent"
            raise AdvantageBreach(
                f"table estimator_states: the baseline of agent {agent!r} of environment {environment!r} was kept by "
                f"key {other!r}, and algorithm.key is {settings.key!r}. Nothing was credited; all that was sampled is "
                "safe. Begin at step 0 (replay: without --steps), or go on with the key that it was kept by."
            )


def _baselines_of(states: pa.Table | None) -> dict[Seat, tuple[float, int]]:
    """Return the baseline of each seat and how many rewards went into it."""
    return {
        (row["environment"], row["example_id"], row["agent"]): (row["values"][0], row["num_traces"])
        for row in (states.to_pylist() if states is not None else ())
    }


def _states(seats: dict[Seat, tuple[float, int]]) -> pa.Table:
    rows = [
        {"environment": seat[0], "example_id": seat[1], "agent": seat[2], "values": [value], "num_traces": count}
        for seat, (value, count) in sorted(seats.items())
    ]
    return pa.Table.from_pylist(rows, schema=ESTIMATOR_STATES.arrow)

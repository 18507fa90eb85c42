"""Agents: which of an environment's seats are trained, and whether the algorithm fits so many.

No config says how many agents an environment has; its traces do.
"""

from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs.algorithms import AlgorithmConfig
from tasks.algorithms.credit import AdvantageBreach
from tasks.columns import texts


def require_agents(
    traces: pa.Table, algorithms: Mapping[str, AlgorithmConfig], step: int, one_learner: Collection[str] = ()
) -> None:
    """Raise AdvantageBreach where an environment has more or fewer trainable agents than its algorithm can credit.

    `traces` are all of a step whose seats are trained (`tasks.seats`), kept or not, and `algorithms` those of their
    environments. An algorithm that keeps no agents apart would average rewards of different seats. One that has a
    baseline for each agent is refused for an environment with a single one, and environments of both kinds are refused
    in one run; of these two only the first step is judged, since later on a seat may be missing only because all its
    rollouts failed. Neither is judged of environments in which each episode has `one_learner`: who that is may change
    from example to example, and a step may happen to hold examples of one of them only.
    """
    ours = _played(traces)
    for environment, settings in algorithms.items():
        own = ours.filter(pc.field("environment") == environment)
        if not settings.per_agent:
            _refuse_several(own, environment, settings.type)
        if not settings.single_agent and step == 0 and environment not in one_learner:
            _refuse_single(own, environment, settings.type)
    if step == 0:
        chosen = pa.array(list(one_learner), pa.string())
        _refuse_both_kinds(ours.filter(pc.invert(pc.is_in(ours["environment"], value_set=chosen))))


def _played(traces: pa.Table) -> pa.Table:
    """Return the trainable traces of which something was sampled: a rollout that failed before may name no seat."""
    rows = np.flatnonzero(traces["trainable"].to_numpy() & (traces["num_turns"].to_numpy() > 0))
    return traces.select(["environment", "group_id", "episode_id", "agent"]).take(rows)


def _refuse_several(traces: pa.Table, environment: str, algorithm: str) -> None:
    seat_of: dict[str, str] = {}
    for group, seat in zip(texts(traces["group_id"]), texts(traces["agent"]), strict=True):
        if seat_of.setdefault(group, seat) != seat:
            raise _breach(
                f"group {group} of environment {environment!r} holds trainable agents {seat_of[group]!r} and "
                f"{seat!r}, and {algorithm!r} keeps no agents apart: rewards of different seats are not comparable",
                "Choose an algorithm with a baseline per agent (rae, hierarchical_grpo), or make one seat trainable",
            )


def _refuse_single(traces: pa.Table, environment: str, algorithm: str) -> None:
    seats = sorted(set(texts(traces["agent"])))
    if len(seats) == 1:
        raise _breach(
            f"environment {environment!r} has one trainable agent, {seats[0]!r}, and {algorithm!r} is for several: it "
            "has a baseline for each of them",
            "Choose an algorithm for a single agent (grpo, rloo), or make more seats trainable",
        )


def _refuse_both_kinds(traces: pa.Table) -> None:
    agents = traces.group_by(["environment"]).aggregate([("agent", "count_distinct")])
    counts = dict(zip(texts(agents["environment"]), agents["agent_count_distinct"].to_pylist(), strict=True))
    single = sorted(name for name, count in counts.items() if count == 1)
    several = sorted(name for name, count in counts.items() if count != 1)
    if single and several:
        raise _breach(
            f"environment {several[0]!r} has {counts[several[0]]} trainable agents and {single[0]!r} has one: a run "
            "holds environments of one kind",
            "Train each kind in a run of its own; the second may start from the weights of the first",
        )


def _breach(what: str, advice: str) -> AdvantageBreach:
    return AdvantageBreach(
        f"table traces, column agent: {what}. Nothing was trained; all that was sampled is safe. {advice}."
    )

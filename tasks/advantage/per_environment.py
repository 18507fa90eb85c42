"""Credits each environment's traces by its own algorithm, and checks that the algorithm fits its agents."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs.algorithms import AlgorithmConfig
from tasks.advantage.algorithms.credit import AdvantageBreach, Credit, GroupedTraces
from tasks.arrays.columns import texts


def require_agents(
    traces: pa.Table, algorithms: Mapping[str, AlgorithmConfig], step: int, one_learner: Collection[str] = ()
) -> None:
    """Raise AdvantageBreach where an environment has more or fewer trainable agents than its algorithm can credit.

    `traces` are all of a step whose seats are trained (`tasks.arrays.seats`), kept or not, and `algorithms` those of
    their environments. An algorithm that keeps no agents apart would average rewards of different seats. One that has a
    baseline for each agent is refused for an environment with a single one, and environments of both kinds are refused
    in one run; of these two only the first step is judged, since later on a seat may be missing only because all its
    rollouts failed. Neither is judged of environments in which each episode has `one_learner`: who that is may change
    from example to example, and a step may happen to hold examples of one of them only.
    """
    ours = _played_traces(traces)
    for environment, settings in algorithms.items():
        own = ours.filter(pc.field("environment") == environment)
        if not settings.per_agent:
            _refuse_several(own, environment, settings.type)
        if not settings.single_agent and step == 0 and environment not in one_learner:
            _refuse_single(own, environment, settings.type)
    if step == 0:
        chosen = pa.array(list(one_learner), pa.string())
        _refuse_both_kinds(ours.filter(pc.invert(pc.is_in(ours["environment"], value_set=chosen))))


def _played_traces(traces: pa.Table) -> pa.Table:
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


Credited = Callable[[GroupedTraces, AlgorithmConfig], Credit]
"""Credits the kept traces of one environment."""


def credit_by_environment(
    kept: GroupedTraces, algorithm_of: Callable[[str], AlgorithmConfig], credited: Credited
) -> Credit:
    """Return the credit of all kept traces, in their order, each environment's by its own algorithm.

    States are those of the environments whose algorithm has any; what one without kept traces had stays as it was.
    """
    environment = np.array(texts(kept.traces["environment"]), object)
    names = list(dict.fromkeys(environment))
    # What most runs have is not copied apart and together again.
    if len(names) == 1 and kept.states is None:
        return credited(kept, algorithm_of(names[0]))
    signal = np.zeros(len(kept.mask.values), np.float32)
    whole = Credit.none(kept)
    seen = [] if kept.states is None else list(dict.fromkeys(texts(kept.states["environment"])))
    states = {name: kept.of(name).states for name in seen}
    for name in names:
        part = credited(kept.of(name), algorithm_of(name))
        of_trace = environment == name
        of_token = of_trace[kept.owner[kept.mask.row_of_value]]
        whole.baseline[of_trace], whole.advantage[of_trace] = part.baseline, part.advantage
        whole.rl[of_token], whole.ce[of_token], whole.ref_kl[of_token] = part.rl, part.ce, part.ref_kl
        signal[of_token] = part.signals(kept.of(name))
        states[name] = part.states
    found = [each for each in states.values() if each is not None]
    after = pa.concat_tables(found) if found else kept.states and kept.states[:0]
    return replace(whole, signal=signal, states=after)

"""Credits each environment's traces by its own algorithm, and checks that the algorithm fits its agents."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs.algorithms import AlgorithmConfig
from tasks.advantage.algorithms.credit import AdvantageBreach, Credit, GroupedTraces
from tasks.arrays.columns import texts


def require_agents(traces: pa.Table, algorithms: Mapping[str, AlgorithmConfig]) -> None:
    """Raise AdvantageBreach where a group holds several trainable agents and its algorithm keeps no agents apart.

    `traces` are all of a step whose seats are trained (`tasks.arrays.seats`), kept or not, and `algorithms` those of
    their environments: rewards of different seats would be averaged. How many seats an environment has is not judged
    from what was played, where a seat may be missing only because its rollouts failed: the seats that the environment
    names are checked before a run starts (`configs.checks.environments.seat_problems`).
    """
    ours = _played_traces(traces)
    for environment, settings in algorithms.items():
        if not settings.per_agent:
            _refuse_several(ours.filter(pc.field("environment") == environment), environment, settings.type)


def _played_traces(traces: pa.Table) -> pa.Table:
    """Return the trainable traces of which something was sampled: a rollout that failed before may name no seat."""
    rows = np.flatnonzero(traces["trainable"].to_numpy() & (traces["num_turns"].to_numpy() > 0))
    return traces.select(["environment", "group_id", "episode_id", "agent"]).take(rows)


def _refuse_several(traces: pa.Table, environment: str, algorithm: str) -> None:
    seat_of: dict[str, str] = {}
    for group, seat in zip(texts(traces["group_id"]), texts(traces["agent"]), strict=True):
        if seat_of.setdefault(group, seat) != seat:
            raise AdvantageBreach(
                f"table traces, column agent: group {group} of environment {environment!r} holds trainable agents "
                f"{seat_of[group]!r} and {seat!r}, and {algorithm!r} keeps no agents apart: rewards of different seats "
                "are not comparable. Nothing was trained; all that was sampled is safe. Choose an algorithm with a "
                "baseline per agent (rae, hierarchical_grpo), or make one seat trainable."
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

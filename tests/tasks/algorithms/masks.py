"""Functions that tests name by import path: keep masks, and algorithms of one's own."""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from configs.algorithms import GrpoConfig, RaeConfig
from tasks.advantage.algorithms.credit import Credit
from tasks.advantage.algorithms.grpo import grpo
from tasks.advantage.algorithms.rae import rae


def below(messages, limit=10):
    """Keep tokens whose id is below a limit."""
    return [[token < limit for token in row] for row in messages["token_ids"].to_pylist()]


def wrong(messages, kind):
    """Return what no keep mask may be."""
    lengths = [len(row) for row in messages["token_ids"].to_pylist()]
    kinds = {
        "too few": [[True] * length for length in lengths[1:]],
        "too long": [[True] * (length + 1) for length in lengths],
        "numbers": [[1] * length for length in lengths],
        "nested": [[True, [False]] for _ in lengths],
        "nothing": None,
    }
    return kinds[kind]


def halved(kept, settings):
    """Credit as grpo does, times a factor."""
    credit = grpo(kept, GrpoConfig())
    return replace(credit, advantage=credit.advantage * settings.arguments.get("factor", 0.5))


def broken(kept, settings):
    """Credit as grpo does, with one thing wrong."""
    credit, kind = grpo(kept, GrpoConfig()), settings.arguments["kind"]
    tokens = len(kept.mask.values)
    ones, traces = np.ones(tokens, np.float32), kept.traces.num_rows
    changed = {
        "a table": None,
        "short": {"advantage": np.zeros(traces + 1)},
        "a list": {"baseline": [0.0] * traces},
        "double weights": {"rl": credit.rl.astype(np.float64)},
        "infinite": {"advantage": np.full(traces, np.inf)},
        "negative": {"ce": -ones},
        "nan": {"rl": credit.rl * np.float32(np.nan)},
        "unsampled": {"rl": ones},
        "unsampled reference": {"ref_kl": ones, "rl": 0 * ones, "signal": ones},
        "both": {"ref_kl": credit.rl, "signal": ones},
        "no signal": {"ref_kl": credit.rl, "rl": 0 * ones},
        "short signal": {"signal": ones[1:]},
        "signal not finite": {"signal": ones * np.float32(np.inf)},
        "no advantage": {"advantage": np.full(traces, np.nan)},
        "state": {"states": kept.traces},
    }[kind]
    return kept.traces if changed is None else replace(credit, **changed)


def signalled(kept, settings):
    """Credit every sampled token by a signal of its own, in one component; the traces have no advantage."""
    none = np.full(kept.traces.num_rows, np.nan)
    weights, zero = kept.mask.values.astype(np.float32), np.zeros(len(kept.mask.values), np.float32)
    streams = {name: weights if name == settings.arguments["component"] else zero for name in ("rl", "ce", "ref_kl")}
    return Credit(none, none, **streams, signal=weights * np.float32(0.25))


def careless(kept, settings):
    """Credit as grpo does, and write to everything that was given, as if every token had been sampled."""
    factor = settings.arguments.pop("factor", 1.0)
    weights = kept.mask.values.astype(np.float32)
    credit = grpo(kept, GrpoConfig())
    kept.mask.values[:] = True
    kept.mask.offsets[:] = 0
    kept.owner[:] = 0
    return replace(credit, advantage=credit.advantage * factor, rl=weights)


def greedy(kept, settings):
    """Credit every token, having said that all were sampled."""
    kept.mask.values[:] = True
    return replace(grpo(kept, GrpoConfig()), rl=kept.mask.values.astype(np.float32))


def forgetful(messages, limits):
    """Keep tokens below the limit, which only the first call finds."""
    return below(messages, limits.pop())


def remembering(kept, settings):
    """Credit as rae does, state and all."""
    return rae(kept, RaeConfig(decay=settings.arguments.get("decay", 0.5)))


def misremembering(kept, settings):
    """Credit as rae does, with something wrong with the state."""
    credit, kind = rae(kept, RaeConfig(decay=0.5)), settings.arguments["kind"]
    rows = credit.states.to_pylist()
    changed = {
        "none": None,
        "credits": kept.traces,
        "elsewhere": [row | {"environment": "elsewhere"} for row in rows],
        "twice": rows * 2,
        "nan": [row | {"values": [float("nan")]} for row in rows],
    }[kind]
    states = pa.Table.from_pylist(changed, credit.states.schema) if isinstance(changed, list) else changed
    return replace(credit, states=states)

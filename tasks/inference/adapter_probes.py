"""Three probes of an engine that serves adapters: batches that mix base and adapter, swaps, and what it costs."""

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

from tasks.inference.engine import MODEL, Engine

PER_POLICY = 3
"""Requests to each policy in the batch that mixes them."""
SWAPS = 5
NEW_TOKENS = 16
"""Tokens that a timed request generates."""
TIMED, WARMING = 9, 2
ARRIVAL_SECONDS = 1.0
Row = Mapping[str, Any]
"""What an engine is held to: policy_key, directory, probe_token_ids, probe_logprobs."""


@dataclass(frozen=True)
class Probed:
    """What a probe found."""

    name: str
    passed: bool
    what: str


def mixed_batch(engine: Engine, base: Row, adapters: Sequence[Row], tolerance: float) -> Probed:
    """Ask base and adapter in one batch; each answer must have the log-probs that the learner gives that policy.

    Every adapter was served by then: values that one left in its slot must not reach the base. The engine is halted
    until the requests are there, so that they are scheduled together.
    """
    for adapter in adapters:
        _serve(engine, base, adapter)
    asked = [(base, MODEL), (adapters[-1], adapters[-1]["policy_key"])] * PER_POLICY
    with ThreadPoolExecutor(len(asked)) as pool:
        with engine.halted():
            waiting = [pool.submit(_logprobs, engine, *each, f"mixed-{i}") for i, each in enumerate(asked)]
            time.sleep(ARRIVAL_SECONDS)  # one that comes late is answered as well, only not with the others
        found = [each.result() for each in waiting]
    off = [_difference(logprobs, row["probe_logprobs"]) for logprobs, (row, _) in zip(found, asked, strict=True)]
    said = f"the base is off by {max(off[0::2]):.2g} nats, the adapter by {max(off[1::2]):.2g}"
    return Probed("mixed batch", max(off) <= tolerance, f"{said}; {tolerance:g} allowed")


def swaps(engine: Engine, base: Row, adapters: Sequence[Row], tolerance: float) -> Probed:
    """Serve one adapter and the other in turn: each answers as the learner says, the third time as the first."""
    expected = [adapter["probe_logprobs"] for adapter in (base, *adapters)]
    apart = min(_difference(x, y) for i, x in enumerate(expected) for y in expected[:i])
    if not apart > 2 * tolerance:
        return Probed("swaps", False, f"the policies are {apart:.2g} nats apart, too little to tell one from another")
    first: dict[str, list[float]] = {}
    off, moved = [], []
    for number in range(SWAPS):
        adapter = adapters[number % len(adapters)]
        _serve(engine, base, adapter)
        logprobs = _logprobs(engine, adapter, adapter["policy_key"], adapter["policy_key"])
        off.append(_difference(logprobs, adapter["probe_logprobs"]))
        moved.append(_difference(logprobs, first.setdefault(adapter["policy_key"], logprobs)))
    said = f"{SWAPS} swaps are off by {max(off):.2g} nats, an adapter that is served again by {max(moved):.2g}"
    return Probed("swaps", max(*off, *moved) <= tolerance, f"{said}; {tolerance:g} allowed")


def slowdown(engine: Engine, plain: Engine, base: Row, adapter: Row) -> Probed:
    """Time the same request at an engine without adapters, and at base and adapter of one with; there is no bound."""
    _serve(engine, base, adapter)
    tokens = list(base["probe_token_ids"])
    without, below, over = (
        _seconds(client, tokens) for client in (plain, engine, engine.asking(adapter["policy_key"]))
    )
    said = f"a request takes {without * 1e3:.0f} ms where no adapters are served"
    return Probed(
        "slowdown", True, f"{said}; {below / without:.2f} times that for the base, {over / without:.2f} with one"
    )


def _serve(engine: Engine, base: Row, adapter: Row) -> None:
    engine.serve(adapter["policy_key"], adapter["directory"], (base["policy_key"], base["directory"]))


def _logprobs(engine: Engine, row: Row, model: str, salt: str) -> list[float]:
    """Return the log-probs that a model gives the row's probe."""
    with closing(engine.asking(model)) as client:
        return client.probe(list(row["probe_token_ids"]), salt)


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest difference; infinite where one is no number, which must not pass."""
    differences = [abs(x - y) for x, y in zip(ours, theirs, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def _seconds(client: Engine, tokens: list[int]) -> float:
    """Return the median time of one request alone; the first ones only warm the engine."""
    taken = []
    for number in range(WARMING + TIMED):
        began = time.perf_counter()
        salt = f"{client.model}-{number}"
        client.generate(tokens, cache_salt=salt, max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        taken.append(time.perf_counter() - began)
    return median(taken[WARMING:])

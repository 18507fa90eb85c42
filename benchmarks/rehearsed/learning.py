"""Stand-ins for what needs a learner: policies of no size, and what one might have measured on real batches."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from configs.run import View
from storage.keys import content_key
from storage.schemas.contract import FLAGS, FLOATS
from storage.schemas.stage_tables import POLICIES, TOKEN_MASKS, TOKEN_STATISTICS, UPDATES
from tasks.arrays.ragged import Ragged, borders
from tasks.runtime.stage import Policy, Tables
from tasks.training.policy import probe_token_ids

Floats = npt.NDArray[np.float64]
TRUST = 0.15
"""Tokens whose log-ratio is further from 0 are masked."""


def imported(tables: Tables, config: View, *, key: str, source: str, directory: Path) -> Tables:
    """Stand in for weights that are brought in."""
    _weights(directory, key)
    return {"policies": _policy(key, 0, None, config)}


def trained(tables: Mapping[str, Any], config: View, *, step: int, key: str, policy: Policy, directory: Path) -> Tables:
    """Stand in for training: the learner's log-probs are the engine's with some noise, more at every seventh step."""
    _weights(directory, key)
    chance = np.random.default_rng(int(key[:16], 16))
    batches = tables["batches"].table()
    engine = Ragged.of(batches["logprobs"]).values.astype(np.float64)
    weights = {name: Ragged.of(batches[f"{name}_weights"]).values for name in ("rl", "ce", "ref_kl")}
    weighed = np.any([values != 0 for values in weights.values()], axis=0)
    noise = chance.normal(0.0, 0.08 if step % 7 == 3 else 0.01, len(engine))
    learner = np.where(weighed, np.minimum(engine + noise, 0.0), 0.0)
    entropies = np.where(weighed, chance.exponential(0.2 + 0.5 * float(np.exp(-step / 80)), len(engine)), 0.0)
    masked = (weights["rl"] != 0) & (np.abs(learner - engine) > TRUST)
    measured = {"logprobs": learner, "entropies": entropies, "masked": masked}
    row = _measured(batches, weights["rl"] != 0, learner - engine, entropies, masked)
    row |= {"version": step + 1, "update": 0, "policy_key_in": policy.key, "has_optimizer": False}
    row |= {"weights_sha256_in": content_key(policy.key), "weights_sha256": content_key(key)}
    row |= {"learning_rate": config.training.learning_rate}
    made = {"updates": pa.Table.from_pylist([row], schema=UPDATES.arrow)}
    return {**made, **_token_tables(batches, measured), "policies": _policy(key, step + 1, policy.key, config)}


def _weights(directory: Path, key: str) -> None:
    """Write a file of weights without any tensor; the key in it keeps one policy's from being another's."""
    header = json.dumps({"__metadata__": {"key": key}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def _policy(key: str, version: int, parent: str | None, config: View) -> pa.Table:
    probe = probe_token_ids(config.model.vocab_size)
    row = {"policy_key": key, "version": version, "parent_key": parent, "weights_sha256": content_key(key)}
    row |= {"has_optimizer": False, "probe_token_ids": probe, "probe_logprobs": [0.0, *[-8.0] * (len(probe) - 1)]}
    return pa.Table.from_pylist([row], schema=POLICIES.arrow)


def _measured(
    batches: pa.Table, rl: npt.NDArray[np.bool_], log_ratio: Floats, entropies: Floats, masked: npt.NDArray[np.bool_]
) -> dict[str, Any]:
    """Return what an optimizer step measures; the mismatch is r - 1 - log r, as of the real learner."""
    ratio = np.exp(log_ratio[rl])
    mismatch = ratio - 1 - log_ratio[rl]
    advantages = Ragged.of(batches["advantages"]).values.astype(np.float64)
    rl_loss = float(-(ratio * advantages[rl]).sum() / max(int(rl.sum()), 1))
    quantiles = {f"ratio_q{each}": float(np.quantile(ratio, each)) for each in (0.01, 0.1, 0.5, 0.9, 0.99)}
    tokens: Mapping[str, int] = {
        name: int(batches[name][0].as_py()) for name in ("rl_tokens", "ce_tokens", "ref_kl_tokens")
    }
    ce_loss = 0.25 if tokens["ce_tokens"] else 0.0
    return {
        "loss": rl_loss + ce_loss,
        "rl_loss": rl_loss,
        "ce_loss": ce_loss,
        "ref_kl_loss": 0.0,
        "grad_norm": float(np.sqrt((advantages[rl] ** 2).mean())),
        "entropy": float(entropies[rl].mean()),
        "mismatch_kl": float(mismatch.mean()),
        "mismatch_kl_max": float(mismatch.max()),
        "masked_fraction": float(masked[rl].mean()),
        "num_rows": batches.num_rows,
        "num_tokens": len(log_ratio),
        **tokens,
        "metrics": json.dumps({"clipped": False, "truncated_fraction": 0.0, **quantiles}, sort_keys=True),
    }


def _token_tables(batches: pa.Table, measured: Mapping[str, npt.NDArray[Any]]) -> Tables:
    """Return what was measured on tokens by sample: rows of a batch, cut where one sample ends and the next begins."""
    samples = pa.array([sample for row in batches["sample_ids"].to_pylist() for sample in row or ()], pa.string())
    lengths = np.concatenate([np.diff(np.array(each)) for each in batches["cu_seqlens"].to_pylist()])
    assert len(lengths) == len(samples), "a batch of one rank has no padding rows"
    cut = {name: Ragged(values, borders(lengths)) for name, values in measured.items()}
    floats = {name: cut[name].arrow(FLOATS) for name in ("logprobs", "entropies")}
    found = np.unique(cut["masked"].row_of_value[cut["masked"].values])
    made = {"token_statistics": pa.table({"sample_id": samples, **floats}, schema=TOKEN_STATISTICS.arrow)}
    if not len(found):
        return made
    masks = {"sample_id": samples.take(pa.array(found)), "masked": cut["masked"].take(found).arrow(FLAGS)}
    return made | {"token_masks": pa.table(masks, schema=TOKEN_MASKS.arrow)}

"""The learner's metrics of one step by environment, out of what it measured on every token.

Names are those of `flows.metrics`: `entropy/all`, `mismatch_kl/reverse-text/max`. They are over all updates of the step
and over tokens, not over rollouts; what a step did not measure has no entry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.schemas.learner_tables import TOKEN_MASKS
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Ref

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
"""Of the importance ratio."""
STREAMS = ("logprobs", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Tokens:
    """Per token of a step's samples, (T,)."""

    streams: Mapping[str, Array]
    """Of the packed rows, and `learner`, `entropies` and, where it is known, `masked` of what was measured."""
    environment: Array
    """Number of its environment."""

    def of(self, chosen: Array) -> "Tokens":
        """Return the chosen tokens."""
        streams = {name: stream[chosen] for name, stream in self.streams.items()}
        return Tokens(streams, self.environment[chosen])


def step_token_metrics(place: RunContext, refs: Sequence[Ref]) -> dict[str, float]:
    """Return the metrics of a step's tokens; none where its training left no statistics."""
    made = {table for ref in refs for table, count in ref.rows if count}
    if not {"batches", "token_statistics", "credits", "traces", "updates"} <= made:
        return {}
    samples = place.table("credits", refs, ["sample_id", "trace_id"])
    traces = place.table("traces", refs, ["trace_id", "environment"])
    found = dict(zip(traces["trace_id"].to_pylist(), traces["environment"].to_pylist(), strict=True))
    pairs = zip(samples["sample_id"].to_pylist(), samples["trace_id"].to_pylist(), strict=True)
    masks = place.table("token_masks", refs) if "token_masks" in made else None
    if masks is None and not any(place.table("updates", refs, ["masked_fraction"])["masked_fraction"].to_pylist()):
        masks = TOKEN_MASKS.arrow.empty_table()
    batches = place.table("batches", refs, ["sample_ids", "cu_seqlens", *STREAMS])
    statistics = place.table("token_statistics", refs)
    return token_metrics(batches, statistics, masks, {sample: found[trace] for sample, trace in pairs})


def token_metrics(
    batches: pa.Table, statistics: pa.Table, masks: pa.Table | None, environments: Mapping[str, str]
) -> dict[str, float]:
    """Return the metrics of all tokens and by environment, which `environments` gives for each sample.

    A sample that is not in `masks` has no masked token; None says that the masks of the step are not known.
    """
    names = sorted(set(environments.values()))
    tokens = _gathered(batches, statistics, masks, {sample: names.index(name) for sample, name in environments.items()})
    metrics = _scope_metrics("all", tokens)
    for number, name in enumerate(names):
        metrics |= _scope_metrics(name, tokens.of(tokens.environment == number))
    return metrics


def _gathered(batches: pa.Table, statistics: pa.Table, masks: pa.Table | None, numbers: Mapping[str, int]) -> Tokens:
    """Return the tokens of all samples in the order of the packed rows, what was measured beside them."""
    filled = batches.filter(pc.greater(pc.list_value_length(batches["sample_ids"]), 0))
    ids = pc.list_flatten(filled["sample_ids"])
    places = pc.index_in(ids, statistics["sample_id"])
    measured = statistics.take(places)
    lengths = pc.list_value_length(measured["logprobs"]).to_numpy()
    streams = {name: _flat(filled[name]) for name in STREAMS}
    streams |= {"learner": _flat(measured["logprobs"]), "entropies": _flat(measured["entropies"])}
    if masks is not None:
        streams["masked"] = _masked(ids, lengths, masks)
    environment = np.array([numbers[sample] for sample in ids.to_pylist()], np.int64)
    return Tokens(streams, np.repeat(environment, lengths))


def _masked(ids: pa.ChunkedArray, lengths: Array, masks: pa.Table) -> Array:
    known = dict(zip(masks["sample_id"].to_pylist(), masks["masked"], strict=True))
    flat = np.zeros(int(lengths.sum()), bool)
    ends = np.cumsum(lengths)
    for sample, end, length in zip(ids.to_pylist(), ends, lengths, strict=True):
        if sample in known:
            flat[end - length : end] = known[sample].values.to_numpy(zero_copy_only=False)
    return flat


def _flat(column: pa.ChunkedArray) -> Array:
    return pc.list_flatten(column).to_numpy().astype(np.float64)


def _scope_metrics(scope: str, tokens: Tokens) -> dict[str, float]:
    streams = tokens.streams
    rl, ce, ref_kl = (streams[f"{name}_weights"] != 0 for name in ("rl", "ce", "ref_kl"))
    members = {"rl": rl, "ce": ce, "ref_kl": ref_kl}
    metrics = {f"{name}_tokens/{scope}": float(member.sum()) for name, member in members.items()}
    log_ratios = streams["learner"] - streams["logprobs"]
    if rl.any():
        metrics |= _rl_metrics(scope, tokens.of(rl).streams, log_ratios[rl])
    if ce.any():
        metrics |= _spread(f"ce_nll/{scope}", -streams["learner"][ce])
    if ref_kl.any():
        metrics[f"ref_kl/{scope}/mean"] = float(np.mean(log_ratios[ref_kl] - streams["advantages"][ref_kl]))
    return metrics


def _rl_metrics(scope: str, streams: Mapping[str, Array], log_ratios: Array) -> dict[str, float]:
    # A ratio that is not finite makes a metric that is not: the monitor names it and leaves it out.
    with np.errstate(over="ignore", invalid="ignore"):
        mismatch = np.expm1(log_ratios) - log_ratios
        quantiles = np.quantile(np.exp(log_ratios), QUANTILES).tolist()
        metrics = {
            f"entropy/{scope}": float(np.mean(streams["entropies"])),
            **_spread(f"mismatch_kl/{scope}", mismatch),
        }
        metrics |= {f"ratio/{scope}/q{q:g}": value for q, value in zip(QUANTILES, quantiles, strict=True)}
        if "masked" not in streams:
            return metrics
        masked, advantages = streams["masked"], streams["advantages"]
        signs = {"": np.ones_like(masked), "/positive": advantages > 0, "/negative": advantages < 0}
        of_sign = {sign: masked[member] for sign, member in signs.items() if member.any()}
        metrics |= {f"masked_fraction/{scope}{sign}": float(np.mean(flags)) for sign, flags in of_sign.items()}
        for group, member in (("masked", masked), ("unmasked", ~masked)):
            if member.any():
                metrics |= _spread(f"mismatch_kl_{group}/{scope}", mismatch[member])
        return metrics


def _spread(name: str, values: Array) -> dict[str, float]:
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/std": float(np.std(values)),
        f"{name}/max": float(np.max(values)),
    }

"""Metrics of a step's tokens: what the learner measured on each of them, for all and by environment.

They are over all updates of the step and over tokens, not over rollouts: `entropy/all`, `mismatch_kl/reverse-text/max`.
What a step did not measure has no entry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import texts
from tasks.metrics.names import ALL, Values

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


def token_metrics(
    batches: pa.Table, statistics: pa.Table, masks: pa.Table | None, environments: Mapping[str, str]
) -> Values:
    """Return the metrics of all tokens and by environment, which `environments` gives for each sample.

    A sample that is not in `masks` has no masked token; None says that the masks of the step are not known.
    """
    names = sorted(set(environments.values()))
    tokens = _gathered(batches, statistics, masks, {sample: names.index(name) for sample, name in environments.items()})
    scopes = {ALL: tokens} | {name: tokens.of(tokens.environment == number) for number, name in enumerate(names)}
    return {(scope, name): value for scope, own in scopes.items() for name, value in _measures(own).items()}


def _gathered(batches: pa.Table, statistics: pa.Table, masks: pa.Table | None, numbers: Mapping[str, int]) -> Tokens:
    """Return the tokens of all samples in the order of the packed rows, what was measured beside them."""
    filled = batches.filter(pc.greater(pc.list_value_length(batches["sample_ids"]), pa.scalar(0)))
    ids = pc.list_flatten(filled["sample_ids"])
    samples = cast(list[str], ids.to_pylist())
    places = pc.index_in(ids, statistics["sample_id"])
    measured = statistics.take(places)
    lengths = pc.list_value_length(measured["logprobs"]).to_numpy()
    streams = {name: _flat(filled[name]) for name in STREAMS}
    streams |= {"learner": _flat(measured["logprobs"]), "entropies": _flat(measured["entropies"])}
    if masks is not None:
        streams["masked"] = _masked(samples, lengths, masks)
    environment = np.array([numbers[sample] for sample in samples], np.int64)
    return Tokens(streams, np.repeat(environment, lengths))


def _masked(samples: Sequence[str], lengths: Array, masks: pa.Table) -> Array:
    known = dict(zip(texts(masks["sample_id"]), masks["masked"], strict=True))
    flat = np.zeros(int(lengths.sum()), bool)
    ends = np.cumsum(lengths)
    for sample, end, length in zip(samples, ends, lengths, strict=True):
        if sample in known:
            flat[end - length : end] = known[sample].values.to_numpy(zero_copy_only=False)
    return flat


def _flat(column: "pa.ChunkedArray[Any]") -> Array:
    return pc.list_flatten(column).to_numpy().astype(np.float64)


def _measures(tokens: Tokens) -> dict[str, float]:
    """Return the measures of some tokens by name, without a scope."""
    streams = tokens.streams
    members = {name: streams[f"{name}_weights"] != 0 for name in ("rl", "ce", "ref_kl")}
    found = {f"{name}_tokens": float(member.sum()) for name, member in members.items()}
    log_ratios = streams["learner"] - streams["logprobs"]
    rl, ce, ref_kl = members.values()
    if rl.any():
        found |= _of_rl_tokens(tokens.of(rl).streams, log_ratios[rl])
    if ce.any():
        found |= _spread("ce_nll", -streams["learner"][ce])
    if ref_kl.any():
        found["ref_kl/mean"] = float(np.mean(log_ratios[ref_kl] - streams["advantages"][ref_kl]))
    return found


def _of_rl_tokens(streams: Mapping[str, Array], log_ratios: Array) -> dict[str, float]:
    # A ratio that is not finite makes a metric that is not: it is kept as it is, and named where it is exported.
    with np.errstate(over="ignore", invalid="ignore"):
        mismatch = np.expm1(log_ratios) - log_ratios
        quantiles = np.quantile(np.exp(log_ratios), QUANTILES).tolist()
        found = {"entropy": float(np.mean(streams["entropies"])), **_spread("mismatch_kl", mismatch)}
        found |= {f"ratio/q{q:g}": value for q, value in zip(QUANTILES, quantiles, strict=True)}
        if "masked" not in streams:
            return found
        masked, advantages = streams["masked"], streams["advantages"]
        signs = {"": np.ones_like(masked), "/positive": advantages > 0, "/negative": advantages < 0}
        of_sign = {sign: masked[member] for sign, member in signs.items() if member.any()}
        found |= {f"masked_fraction{sign}": float(np.mean(flags)) for sign, flags in of_sign.items()}
        for group, member in (("masked", masked), ("unmasked", ~masked)):
            if member.any():
                found |= _spread(f"mismatch_kl_{group}", mismatch[member])
        return found


def _spread(name: str, values: Array) -> dict[str, float]:
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/std": float(np.std(values)),
        f"{name}/max": float(np.max(values)),
    }

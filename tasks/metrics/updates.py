"""Metrics of what the learner measured in a step: of its optimizer steps, and of every token.

Those of tokens are over all updates of the step and not over rollouts, for all and by environment: `entropy/all`,
`mismatch_kl/reverse-text/max`. What a step did not measure has no entry.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import texts
from tasks.metrics.figures import ALL, Values, mean

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
"""Of the importance ratio."""
STREAMS = ("logprobs", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")
Array = npt.NDArray[Any]
Tokens = Mapping[str, Array]
"""Streams of a step's samples, (T,) each: STREAMS of the packed rows, `learner`, `entropies` and, where it is known,
`masked` of what was measured, and `environment`, the number of each token's environment."""

_NOT_NUMBERS = ("policy_key_in", "weights_sha256_in", "weights_sha256", "metrics")
SPREAD = (
    *("loss", "rl_loss", "ce_loss", "ref_kl_loss", "grad_norm", "entropy", "mismatch_kl", "masked_fraction"),
    "learning_rate",
)
"""What is also told as mean, least and most of all optimizer steps on a batch."""


def update_metrics(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of the rows of `updates` of one step, in the order of the updates; none of no rows.

    `update/loss` is of the last optimizer step, further metrics of the learner included. `updates` counts them;
    `updates/loss/mean`, `min` and `max` are over all of them; `updates/num_tokens` and `updates/weighted_tokens` are
    sums.
    """
    if not updates:
        return {}
    found = _of_last(updates[-1]) | {"updates": float(len(updates))}
    for name in SPREAD:
        values = [row[name] for row in updates if row.get(name) is not None]
        if values:
            found[f"updates/{name}/mean"] = mean(values)
            found |= {f"updates/{name}/min": _extreme(min, values), f"updates/{name}/max": _extreme(max, values)}
    found["updates/num_tokens"] = float(sum(row["num_tokens"] for row in updates))
    found["updates/weighted_tokens"] = float(sum(_num_weighted(row) for row in updates))
    return found


def _of_last(update: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an optimizer step.

    Those further ones that were not finite are null in the JSON, which has no form for them, and NaN here.
    """
    further = json.loads(update.get("metrics") or "{}")
    # As NaN they stay visible: null alone would read as not measured.
    further |= dict.fromkeys(further.pop("not_finite", ()), math.nan)
    values = {name: value for name, value in update.items() if name not in _NOT_NUMBERS} | further
    return {f"update/{name}": float(value) for name, value in values.items() if isinstance(value, (int, float))}


def _num_weighted(row: Mapping[str, Any]) -> int:
    """Return the tokens that had a weight: reference KL is of those of the rl component, where there are any."""
    return int(max(row["rl_tokens"], row["ref_kl_tokens"]) + row["ce_tokens"])


def _extreme(pick: Callable[[Iterable[float]], float], values: Sequence[float]) -> float:
    """Return the least or the most; NaN where any of them is, whatever the order."""
    return math.nan if any(math.isnan(value) for value in values) else float(pick(values))


def token_metrics(
    batches: pa.Table, statistics: pa.Table, masks: pa.Table | None, environments: Mapping[str, str]
) -> Values:
    """Return the metrics of all tokens and by environment, which `environments` gives for each sample.

    A sample that is not in `masks` has no masked token; None says that the masks of the step are not known.
    """
    names = sorted(set(environments.values()))
    tokens = _packed_tokens(
        batches, statistics, masks, {sample: names.index(name) for sample, name in environments.items()}
    )
    scopes = {ALL: tokens} | {
        name: _select(tokens, tokens["environment"] == number) for number, name in enumerate(names)
    }
    return {(scope, name): value for scope, own in scopes.items() for name, value in _measures(own).items()}


def _packed_tokens(
    batches: pa.Table, statistics: pa.Table, masks: pa.Table | None, numbers: Mapping[str, int]
) -> Tokens:
    """Return the tokens of all samples in the order of the packed rows, what was measured beside them."""
    filled = batches.filter(pc.greater(pc.list_value_length(batches["sample_ids"]), pa.scalar(0)))
    ids = pc.list_flatten(filled["sample_ids"])
    samples = cast(list[str], ids.to_pylist())
    # Statistics are in the order of training, which need not be that of the packed rows.
    places = pc.index_in(ids, statistics["sample_id"])
    measured = statistics.take(places)
    lengths = pc.list_value_length(measured["logprobs"]).to_numpy()
    streams = {name: _flat(filled[name]) for name in STREAMS}
    streams |= {"learner": _flat(measured["logprobs"]), "entropies": _flat(measured["entropies"])}
    if masks is not None:
        streams["masked"] = _mask_stream(samples, lengths, masks)
    streams["environment"] = np.repeat([numbers[sample] for sample in samples], lengths)
    return streams


def _select(tokens: Tokens, chosen: Array) -> Tokens:
    return {name: stream[chosen] for name, stream in tokens.items()}


def _mask_stream(samples: Sequence[str], lengths: Array, masks: pa.Table) -> Array:
    known = dict(zip(texts(masks["sample_id"]), masks["masked"], strict=True))
    flat = np.zeros(int(lengths.sum()), bool)
    ends = np.cumsum(lengths)
    # A sample without a masked token has no row in the table of masks.
    for sample, end, length in zip(samples, ends, lengths, strict=True):
        if sample in known:
            flat[end - length : end] = known[sample].values.to_numpy(zero_copy_only=False)
    return flat


def _flat(column: "pa.ChunkedArray[Any]") -> Array:
    return pc.list_flatten(column).to_numpy().astype(np.float64)


def _measures(tokens: Tokens) -> dict[str, float]:
    """Return the measures of some tokens by name, without a scope."""
    members = {name: tokens[f"{name}_weights"] != 0 for name in ("rl", "ce", "ref_kl")}
    found = {f"{name}_tokens": float(member.sum()) for name, member in members.items()}
    log_ratios = tokens["learner"] - tokens["logprobs"]
    rl, ce, ref_kl = members.values()
    if rl.any():
        found |= _of_rl_tokens(_select(tokens, rl), log_ratios[rl])
    if ce.any():
        found |= _spread("ce_nll", -tokens["learner"][ce])
    if ref_kl.any():
        found["ref_kl/mean"] = float(np.mean(log_ratios[ref_kl] - tokens["advantages"][ref_kl]))
    return found


def _of_rl_tokens(streams: Tokens, log_ratios: Array) -> dict[str, float]:
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

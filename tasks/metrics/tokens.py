"""Metrics of what the learner measured on every token of a step.

They are over all updates of the step and not over rollouts, for all and by environment: `entropy/all`,
`mismatch_kl/reverse-text/max`. What a step did not measure has no entry. Tokens are gone through a part of the packed
rows after the other, three times: they are counted, then added up, then their squared deviations are. The numbers are
those that numpy finds with all tokens in one array, to the bit.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import texts
from tasks.arrays.quantiles import Quantiles
from tasks.arrays.samples import COMPONENTS
from tasks.metrics.figures import ALL, Values
from tasks.runtime.stored_rows import StoredRows

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
"""Of the importance ratio."""
STREAMS = ("logprobs", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")
MEASURED = ("sample_id", "logprobs", "entropies")
NUMBERS = {
    "entropy": "rl",
    "mismatch_kl": "rl",
    "mismatch_kl_masked": "masked",
    "mismatch_kl_unmasked": "unmasked",
    "ce_nll": "ce",
    "ref_kl": "ref_kl",
}
"""The tokens that each kind of numbers is of."""
MEANS = {"entropy": "entropy", "ref_kl": "ref_kl/mean"}
"""The metric of those of which the mean alone is told; of the others there are deviation and maximum, too."""
MOST_IN_MEMORY = 1 << 28
"""Bytes of importance ratios, of all scopes together, that stay in memory."""
Array = npt.NDArray[Any]
Tokens = Mapping[str, Array]
"""Streams of samples, (T,) each: STREAMS of the packed rows, `learner`, `entropies` and, where it is known, `masked` of
what was measured, and `environment`, the number of each token's environment."""


def token_metrics(
    batches: StoredRows, statistics: StoredRows, masks: pa.Table | None, environments: Mapping[str, str]
) -> Values:
    """Return the metrics of all tokens and by environment, which `environments` gives for each sample.

    A sample that is not in `masks` has no masked token; None says that the masks of the step are not known. Raises
    NotMeasured where a packed sample has no row in `statistics`.
    """
    names = sorted(set(environments.values()))
    numbers = {sample: names.index(name) for sample, name in environments.items()}
    masked = None if masks is None else dict(zip(texts(masks["sample_id"]), masks["masked"], strict=True))

    def read() -> Iterator[Tokens]:
        return _packed_tokens(batches, statistics, masked, numbers)

    held = list(read()) if batches.num_parts <= 1 else None
    # One environment has the tokens of all: they are not counted twice.
    scopes = names if len(names) > 1 else []
    whole, *own = _measures(lambda: read() if held is None else held, len(scopes))
    found = {ALL: whole} | (dict(zip(scopes, own, strict=True)) or dict.fromkeys(names, whole))
    return {(scope, name): value for scope, values in found.items() for name, value in values.items()}


def _measures(parts: Callable[[], Iterable[Tokens]], num_environments: int) -> list[dict[str, float]]:
    """Return the measures by name, without a scope, of all tokens and of each environment."""
    most = MOST_IN_MEMORY // (1 + num_environments)
    whole, *own = [TokenMeasures(most) for _ in range(1 + num_environments)]
    # A ratio that is not finite makes a metric that is not: it is kept as it is, and named where it is exported.
    with np.errstate(over="ignore", invalid="ignore"):
        for take in (TokenMeasures.count, TokenMeasures.add, TokenMeasures.add_deviations):
            for tokens in parts():
                take(whole, tokens)
                there = np.flatnonzero(np.bincount(tokens["environment"]))
                for number in there.tolist() if own else ():
                    take(own[number], _select(tokens, tokens["environment"] == number))
        return [each.values() for each in (whole, *own)]


class NotMeasured(ValueError):
    """A sample was packed, and the learner measured nothing on it."""


def _packed_tokens(
    batches: StoredRows, statistics: StoredRows, masked: Mapping[str, Any] | None, numbers: Mapping[str, int]
) -> Iterator[Tokens]:
    """Yield the tokens of all samples in the order of the packed rows, what was measured beside them."""
    coming, waiting = statistics.parts(MEASURED), statistics.schema.empty_table().select(list(MEASURED))
    for part in batches.parts(["sample_ids", *STREAMS]):
        filled = part.filter(pc.greater(pc.list_value_length(part["sample_ids"]), pa.scalar(0)))
        ids = pc.list_flatten(filled["sample_ids"])
        # They come in the order in which they were trained, which is mostly that of the rows: then few are waiting.
        while (places := pc.index_in(ids, waiting["sample_id"])).null_count:
            if (further := next(coming, None)) is None:
                raise _not_measured(ids.filter(pc.is_null(places))[0])
            waiting = pa.concat_tables([waiting, further])
        measured = waiting.take(places)
        waiting = waiting.filter(pc.invert(pc.is_in(waiting["sample_id"], value_set=ids)))
        samples, lengths = cast(list[str], ids.to_pylist()), pc.list_value_length(measured["logprobs"]).to_numpy()
        streams = {name: _flat(filled[name]) for name in STREAMS}
        streams |= {"learner": _flat(measured["logprobs"]), "entropies": _flat(measured["entropies"])}
        if masked is not None:
            # A sample without a masked token has no row in the table of masks.
            flags = [
                masked[sample].values.to_numpy(zero_copy_only=False) if sample in masked else np.zeros(length, bool)
                for sample, length in zip(samples, lengths.tolist(), strict=True)
            ]
            streams["masked"] = np.concatenate([np.zeros(0, bool), *flags])
        streams["environment"] = np.repeat(np.array([numbers[sample] for sample in samples], np.int64), lengths)
        yield streams


def _not_measured(sample: object) -> NotMeasured:
    return NotMeasured(
        f"table token_statistics, column sample_id: sample {sample} is packed, and nothing was measured on it. The "
        "rows stay as they are; look at the stage training before going on."
    )


def _select(tokens: Tokens, chosen: Array) -> Tokens:
    return {name: stream[chosen] for name, stream in tokens.items()}


def _flat(column: "pa.ChunkedArray[Any]") -> Array:
    return pc.list_flatten(column).to_numpy().astype(np.float64)


def _members(tokens: Tokens) -> dict[str, Array]:
    """Return which tokens have weight, by component, and which of those of rl were masked or not, if that is known."""
    found = {name: tokens[f"{name}_weights"] != 0 for name in COMPONENTS}
    if "masked" in tokens:
        rl, masked, advantages = found["rl"], tokens["masked"], tokens["advantages"]
        found |= {"rl/positive": rl & (advantages > 0), "rl/negative": rl & (advantages < 0), "masked": rl & masked}
        found |= {f"masked{sign}": found[f"rl{sign}"] & masked for sign in ("/positive", "/negative")}
        found["unmasked"] = rl & ~masked
    return found


def _numbers(tokens: Tokens) -> Iterator[tuple[str, Array]]:
    """Yield the numbers that are added up, by NUMBERS."""
    members, log_ratios = _members(tokens), tokens["learner"] - tokens["logprobs"]
    mismatch = np.expm1(log_ratios) - log_ratios
    values = {"entropy": tokens["entropies"], "ce_nll": -tokens["learner"], "ref_kl": log_ratios - tokens["advantages"]}
    values |= dict.fromkeys(("mismatch_kl", "mismatch_kl_masked", "mismatch_kl_unmasked"), mismatch)
    for name, of in NUMBERS.items():
        if of in members:
            yield name, values[name][members[of]]


class TokenMeasures:
    """What is measured of the tokens of a scope: they are counted first, then added, then their deviations are."""

    def __init__(self, most_in_memory: int) -> None:
        self._counts = Counter[str]()
        self._sums: dict[str, NumpySum] = {}
        self._squares: dict[str, NumpySum] = {}
        self._maxima: dict[str, float] = {}
        self._ratios = Quantiles(most_in_memory)

    def count(self, tokens: Tokens) -> None:
        """Count some of the tokens."""
        self._counts.update({name: int(member.sum()) for name, member in _members(tokens).items()})

    def add(self, tokens: Tokens) -> None:
        """Add them up."""
        rl = tokens["rl_weights"] != 0
        self._ratios.add(np.exp(tokens["learner"][rl] - tokens["logprobs"][rl]))
        for name, values in _numbers(tokens):
            if len(values):
                self._sum(self._sums, name).add(values)
                # Unlike max(), this keeps what is no number.
                self._maxima[name] = float(np.maximum(self._maxima.get(name, -math.inf), np.max(values)))

    def add_deviations(self, tokens: Tokens) -> None:
        """Add up the squares of their deviations."""
        for name, values in _numbers(tokens):
            if name not in MEANS and len(values):
                deviations = values - self._sums[name].mean()
                self._sum(self._squares, name).add(deviations * deviations)

    def _sum(self, sums: "dict[str, NumpySum]", name: str) -> "NumpySum":
        if name not in sums:
            sums[name] = NumpySum(self._counts[NUMBERS[name]])
        return sums[name]

    def values(self) -> dict[str, float]:
        """Return the measures by name."""
        found = {f"{name}_tokens": float(self._counts[name]) for name in COMPONENTS}
        for name, total in self._sums.items():
            if name in MEANS:
                found[MEANS[name]] = total.mean()
            else:
                found |= {f"{name}/mean": total.mean(), f"{name}/std": math.sqrt(self._squares[name].mean())}
                found[f"{name}/max"] = self._maxima[name]
        ratios = self._ratios.at(QUANTILES) or []
        found |= {f"ratio/q{q:g}": value for q, value in zip(QUANTILES, ratios, strict=bool(ratios))}
        for sign in ("", "/positive", "/negative"):
            if "masked" in self._counts and self._counts[f"rl{sign}"]:
                found[f"masked_fraction{sign}"] = self._counts[f"masked{sign}"] / self._counts[f"rl{sign}"]
        return found


class NumpySum:
    """The sum of so many numbers that come in parts: what `numpy.sum` returns of all of them, to the bit.

    numpy adds the sums of two halves, each of which is made in the same way, so that rounding errors hardly grow with
    the number of numbers. Which halves these are follows from that number alone.
    """

    LEAF = 1 << 14
    """So many numbers or fewer are left to numpy."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._leaves = _leaves(count, self.LEAF)
        self._found: list[float] = []
        self._rest = np.zeros(0)

    def add(self, values: Array) -> None:
        """Add the numbers that come next; they are of float64."""
        values = np.concatenate([self._rest, values])
        begin = 0
        for leaf in islice(self._leaves, len(self._found), None):
            if begin + leaf > len(values):
                break
            self._found.append(float(np.add.reduce(values[begin : begin + leaf])))
            begin += leaf
        self._rest = values[begin:].copy()

    def mean(self) -> float:
        """Return their mean, once all have been added."""
        assert len(self._found) == len(self._leaves), "some of the numbers have not been added"
        return _add_halves(self._count, self.LEAF, iter(self._found)) / self._count


def _halves(count: int) -> tuple[int, int]:
    first = count // 2 - count // 2 % 8
    return first, count - first


def _leaves(count: int, most: int) -> list[int]:
    return [count] if count <= most else [leaf for half in _halves(count) for leaf in _leaves(half, most)]


def _add_halves(count: int, most: int, sums: Iterator[float]) -> float:
    if count <= most:
        return next(sums)
    first, second = _halves(count)
    return _add_halves(first, most, sums) + _add_halves(second, most, sums)

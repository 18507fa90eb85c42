"""Metrics of what the learner measured on every token of a step.

They are over all updates of the step and not over rollouts, for all and by environment: `entropy/all`,
`mismatch_kl/reverse-text/max`. What a step did not measure has no entry. Tokens are gone through a part of the packed
rows after the other, three times: they are counted, then added up, then their squared deviations are. The numbers are
those that numpy finds with all tokens in one array, to the bit.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import texts
from tasks.arrays.quantiles import Quantiles
from tasks.arrays.samples import COMPONENTS, WEIGHTS
from tasks.metrics.figures import ALL, Values
from tasks.runtime.stored_rows import StoredRows

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
"""Of the importance ratio."""
STREAMS = ("logprobs", "advantages", *WEIGHTS)
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
"""The metric of those of which the mean alone is reported; of the others there are deviation and maximum, too."""
MOST_IN_MEMORY = 1 << 27
"""Bytes of importance ratios, of all scopes together, that stay in memory."""
Array = npt.NDArray[Any]
Tokens = Mapping[str, Array]
"""Streams of samples, (T,) each: STREAMS of the packed rows, `learner` and `entropies` of what was measured, of float32
all of them; `masked`, where it is known, and `environment`, the number of each token's environment, where there
are several. What is only counted lacks the log-probs and entropies."""


def token_metrics(
    batches: StoredRows, statistics: StoredRows, masks: pa.Table | None, environments: Mapping[str, str]
) -> Values:
    """Return the metrics of all tokens and by environment, which `environments` gives for each sample.

    A sample that is not in `masks` has no masked token; None says that the masks of the step are not known. Raises
    NotMeasured where a packed sample has no row in `statistics`.
    """
    names = sorted(set(environments.values()))
    # One environment has the tokens of all: they are not counted twice.
    scopes = names if len(names) > 1 else []
    numbers = {sample: scopes.index(name) for sample, name in environments.items()} if scopes else {}
    masked = None if masks is None else dict(zip(texts(masks["sample_id"]), masks["masked"], strict=True))

    def read(counting: bool) -> Iterator[Tokens]:
        return _packed_tokens(batches, None if counting else statistics, masked, numbers)

    held = list(read(counting=False)) if batches.num_parts <= 1 else None
    whole, *own = _measures(lambda counting: read(counting) if held is None else held, len(scopes))
    found = {ALL: whole} | (dict(zip(scopes, own, strict=True)) or dict.fromkeys(names, whole))
    return {(scope, name): value for scope, values in found.items() for name, value in values.items()}


def _measures(parts: Callable[[bool], Iterable[Tokens]], num_environments: int) -> list[dict[str, float]]:
    """Return the measures by name, without a scope, of all tokens and of each environment.

    `parts` is called for each time that tokens are gone through, with whether they are only counted.
    """
    most = MOST_IN_MEMORY // (1 + num_environments)
    whole, *own = [TokenMeasures(most) for _ in range(1 + num_environments)]
    # A ratio that is not finite makes a metric that is not: it is kept as it is, and named where it is exported.
    with np.errstate(over="ignore", invalid="ignore"):
        for take in (TokenMeasures.count, TokenMeasures.add, TokenMeasures.add_deviations):
            for tokens in parts(take == TokenMeasures.count):
                take(whole, tokens)
                there = np.flatnonzero(np.bincount(tokens["environment"])).tolist() if own else ()
                for number in there:
                    take(own[number], _select(tokens, tokens["environment"] == number))
        return [each.values() for each in (whole, *own)]


def _without_padding(rows: pa.Table) -> pa.Table:
    filled = pc.greater(pc.list_value_length(rows["sample_ids"]), pa.scalar(0))
    return rows if pc.all(filled).as_py() else rows.filter(filled)  # which copies them


class NotMeasured(ValueError):
    """A sample was packed, and the learner measured nothing on it."""


def _packed_tokens(
    batches: StoredRows, statistics: StoredRows | None, masked: Mapping[str, Any] | None, numbers: Mapping[str, int]
) -> Iterator[Tokens]:
    """Yield the tokens of all samples in the order of the packed rows, what was measured beside them.

    `numbers` has the number of each sample's environment; nothing where there is one.
    """
    measured = Measured(statistics) if statistics is not None else None
    names = STREAMS if measured else ("advantages", *WEIGHTS)
    for part in batches.parts(["sample_ids", "cu_seqlens", *names]):
        filled = _without_padding(part)
        samples = cast(list[str], pc.list_flatten(filled["sample_ids"]).to_pylist())
        lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(each) for each in filled["cu_seqlens"].to_numpy())])
        streams = {name: _flat(filled[name]) for name in names} | (measured.of(samples) if measured else {})
        if masked is not None:
            # A sample without a masked token has no row in the table of masks.
            flags = [
                masked[sample].values.to_numpy(zero_copy_only=False) if sample in masked else np.zeros(length, bool)
                for sample, length in zip(samples, lengths.tolist(), strict=True)
            ]
            streams["masked"] = np.concatenate([np.zeros(0, bool), *flags])
        if numbers:
            streams["environment"] = np.repeat(np.array([numbers[sample] for sample in samples], np.int32), lengths)
        yield streams


class Measured:
    """What was measured on tokens, by sample.

    Samples come in the order in which they were trained, which is mostly that in which they are asked for: then few are
    held.
    """

    def __init__(self, statistics: StoredRows) -> None:
        self._coming = statistics.parts(MEASURED)
        self._waiting = statistics.schema.empty_table().select(list(MEASURED))

    def of(self, samples: Sequence[str]) -> dict[str, Array]:
        """Return the streams of some samples, one after the other; each may be asked for once."""
        ids = pa.array(samples, pa.string())
        while (places := pc.index_in(ids, self._waiting["sample_id"])).null_count:
            if (further := next(self._coming, None)) is None:
                raise NotMeasured(
                    f"table token_statistics, column sample_id: sample {ids.filter(pc.is_null(places))[0]} is packed, "
                    "and nothing was measured on it. The rows stay as they are; look at the stage training."
                )
            self._waiting = pa.concat_tables([self._waiting, further])
        if np.array_equal(places, np.arange(len(samples))):
            found, self._waiting = self._waiting.slice(0, len(samples)), self._waiting.slice(len(samples))
        else:
            found = self._waiting.take(places)
            self._waiting = self._waiting.filter(pc.invert(pc.is_in(self._waiting["sample_id"], value_set=ids)))
        return {"learner": _flat(found["logprobs"]), "entropies": _flat(found["entropies"])}


def _select(tokens: Tokens, chosen: Array) -> Tokens:
    return {name: stream[chosen] for name, stream in tokens.items()}


def _flat(column: "pa.ChunkedArray[Any]") -> Array:
    parts = [cast(Any, chunk).flatten().to_numpy() for chunk in column.chunks]
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.float32), *parts])


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
    members = _members(tokens)
    rl, ce, ref_kl = (members[name] for name in COMPONENTS)
    log_ratios = _log_ratios(tokens, rl)
    mismatch = np.expm1(log_ratios) - log_ratios
    yield "entropy", tokens["entropies"][rl].astype(np.float64)
    yield "mismatch_kl", mismatch
    if "masked" in tokens:
        masked = tokens["masked"][rl]
        yield "mismatch_kl_masked", mismatch[masked]
        yield "mismatch_kl_unmasked", mismatch[~masked]
    yield "ce_nll", -tokens["learner"][ce].astype(np.float64)
    yield "ref_kl", _log_ratios(tokens, ref_kl) - tokens["advantages"][ref_kl]


def _log_ratios(tokens: Tokens, members: Array) -> Array:
    """Return log-probs of some tokens by the learner, less those of the engine; of float64."""
    return tokens["learner"][members].astype(np.float64) - tokens["logprobs"][members]


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
        self._ratios.add(np.exp(_log_ratios(tokens, tokens["rl_weights"] != 0)))
        for name, values in _numbers(tokens):
            if len(values):
                self._sum(self._sums, name).add(values)
                # Unlike max(), this keeps what is no number.
                self._maxima[name] = float(np.maximum(self._maxima.get(name, -math.inf), np.max(values)))

    def add_deviations(self, tokens: Tokens) -> None:
        """Add up the squares of their deviations."""
        for name, values in _numbers(tokens):
            if name not in MEANS and len(values):
                deviations = values - self._sums[name].mean
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
                found[MEANS[name]] = total.mean
            else:
                found |= {f"{name}/mean": total.mean, f"{name}/std": math.sqrt(self._squares[name].mean)}
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

    @cached_property
    def mean(self) -> float:
        """Their mean, once all have been added."""
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

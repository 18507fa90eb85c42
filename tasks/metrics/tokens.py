"""Metrics of what the learner measured on every token of a step.

They are over all updates of the step and not over rollouts, for all and by environment: `entropy/all`,
`mismatch_kl/reverse-text/max`. What a step did not measure has no entry. The packed rows are read once, part by part;
the metrics do not depend, to the bit, on how the rows are divided into parts.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import rows_without, texts
from tasks.arrays.samples import COMPONENTS, WEIGHTS
from tasks.metrics.figures import ALL, Values
from tasks.runtime.stored_rows import StoredRows

STREAMS = ("logprobs", "advantages", *WEIGHTS)
MEASURED = ("sample_id", "logprobs", "entropies")
MEANS = {"entropy": "entropy", "ref_kl": "ref_kl/mean"}
"""The metric of those of which the mean alone is reported; of the others there are deviation and maximum, too."""
Array = npt.NDArray[Any]
Tokens = Mapping[str, Array]
"""Streams of samples, (T,) each: STREAMS of the packed rows, `learner` and `entropies` of what was measured, of float32
all of them; `masked`, where it is known, and `environment`, the number of each token's environment, where there
are several."""


def token_metrics(
    batches: StoredRows, statistics: StoredRows, masks: pa.Table | None, environments: Mapping[str, str]
) -> Values:
    """Return the metrics of all tokens and by environment, which `environments` gives for each sample.

    A sample that is not in `masks` has no masked token; None says that the masks of the step are not known. Raises
    NotMeasured where a packed sample has no row in `statistics`.
    """
    names = sorted(set(environments.values()))
    # One environment has the tokens of all: they are not measured twice.
    scopes = names if len(names) > 1 else []
    numbers = {sample: scopes.index(name) for sample, name in environments.items()} if scopes else {}
    masked = None if masks is None else dict(zip(texts(masks["sample_id"]), masks["masked"], strict=True))
    whole, *by_environment = [TokenMeasures() for _ in range(1 + len(scopes))]
    # A ratio that is not finite makes a metric that is not: it is kept as it is, and named where it is exported.
    with np.errstate(over="ignore", invalid="ignore"):
        for tokens in _packed_tokens(batches, statistics, masked, numbers):
            whole.add(tokens)
            for number in np.unique(tokens["environment"]) if by_environment else ():
                members = tokens["environment"] == number
                by_environment[number].add({name: stream[members] for name, stream in tokens.items()})
        values = [measures.values() for measures in (whole, *by_environment)]
    by_scope = {ALL: values[0]} | (dict(zip(scopes, values[1:], strict=True)) or dict.fromkeys(names, values[0]))
    return {(scope, name): value for scope, measures in by_scope.items() for name, value in measures.items()}


def _without_padding(rows: pa.Table) -> pa.Table:
    filled = pc.greater(pc.list_value_length(rows["sample_ids"]), pa.scalar(0))
    return rows if pc.all(filled).as_py() else rows.filter(filled)  # which copies them


class NotMeasured(ValueError):
    """A sample was packed, and the learner measured nothing on it."""


def _packed_tokens(
    batches: StoredRows, statistics: StoredRows, masked: Mapping[str, Any] | None, numbers: Mapping[str, int]
) -> Iterator[Tokens]:
    """Yield the tokens of all samples in the order of the packed rows, what was measured beside them.

    `numbers` has the number of each sample's environment; nothing where there is one.
    """
    measured = Measured(statistics)
    for part in batches.parts(["sample_ids", "cu_seqlens", *STREAMS]):
        filled = _without_padding(part)
        samples = cast(list[str], pc.list_flatten(filled["sample_ids"]).to_pylist())
        lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(each) for each in filled["cu_seqlens"].to_numpy())])
        streams = {name: _flat(filled[name]) for name in STREAMS} | measured.of(samples)
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
            self._waiting = rows_without(self._waiting, "sample_id", samples)
        return {"learner": _flat(found["logprobs"]), "entropies": _flat(found["entropies"])}


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
    """Yield the numbers whose moments are reported."""
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
    """What is measured of the tokens of a scope, which come in parts."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._moments = defaultdict[str, Moments](Moments)

    def add(self, tokens: Tokens) -> None:
        """Take the tokens of a part."""
        self._counts.update({name: int(member.sum()) for name, member in _members(tokens).items()})
        for name, values in _numbers(tokens):
            self._moments[name].add(values)

    def values(self) -> dict[str, float]:
        """Return the measures by name, once all tokens have been added."""
        measures = {f"{name}_tokens": float(self._counts[name]) for name in COMPONENTS}
        for name, moments in self._moments.items():
            mean, deviation, maximum = moments.close()
            if not moments.count:
                continue
            if name in MEANS:
                measures[MEANS[name]] = mean
            else:
                measures |= {f"{name}/mean": mean, f"{name}/std": deviation, f"{name}/max": maximum}
        for sign in ("", "/positive", "/negative"):
            if "masked" in self._counts and self._counts[f"rl{sign}"]:
                measures[f"masked_fraction{sign}"] = self._counts[f"masked{sign}"] / self._counts[f"rl{sign}"]
        return measures


class Moments:
    """Mean, standard deviation (population) and maximum of numbers that come in parts.

    Blocks of a fixed size are merged in order, so that the result does not depend on the parts. Source: Chan, Golub and
    LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """

    BLOCK = 1 << 14

    def __init__(self) -> None:
        self.count = 0
        # Numbers of numpy, which become infinite where those of Python raise.
        self._mean, self._squares, self._maximum = np.float64(0), np.float64(0), np.float64(-math.inf)
        self._rest = np.zeros(0)

    def add(self, values: Array) -> None:
        """Take the numbers that come next, of float64."""
        values = np.concatenate([self._rest, values])
        borders = range(self.BLOCK, len(values) + 1, self.BLOCK)
        *blocks, rest = np.split(values, borders)
        self._rest = rest.copy()  # a view would hold all values
        for block in blocks:
            self._merge(block)

    def close(self) -> tuple[float, float, float]:
        """Return mean, deviation and maximum of all numbers; the mean of none is 0."""
        if len(self._rest):
            self._merge(self._rest)
            self._rest = np.zeros(0)
        return float(self._mean), math.sqrt(self._squares / max(self.count, 1)), float(self._maximum)

    def _merge(self, block: Array) -> None:
        count, mean = self.count + len(block), np.mean(block)
        difference = mean - self._mean
        self._squares += np.sum((block - mean) ** 2) + difference**2 * self.count * len(block) / count
        self._mean += difference * len(block) / count
        self._maximum = np.maximum(self._maximum, np.max(block))  # unlike max(), this keeps NaN
        self.count = count

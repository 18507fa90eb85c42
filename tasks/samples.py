"""Samples: the branches that carry weight, with all per-token streams that a packed row is made of."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.branches import owners
from tasks.columns import texts
from tasks.ragged import Integers, Ragged

COMPONENTS = ("rl", "ce", "ref_kl")


class PackingBreach(ValueError):
    """The tables do not fit together, or a sample did not end up in exactly one row."""


@dataclass(frozen=True)
class Samples:
    """Samples with their streams, named like the columns of batches."""

    ids: list[str]
    groups: list[str]
    streams: dict[str, Ragged]

    @property
    def lengths(self) -> Integers:
        """Tokens of each sample; shape [samples]."""
        return self.streams["token_ids"].lengths

    def take(self, samples: npt.ArrayLike) -> "Samples":
        """Return these samples in this order."""
        chosen = np.asarray(samples, np.int64)
        streams = {name: stream.take(chosen) for name, stream in self.streams.items()}
        return Samples([self.ids[i] for i in chosen], [self.groups[i] for i in chosen], streams)


def weighted_samples(credits: pa.Table, messages: pa.Table, traces: pa.Table) -> Samples:
    """Return the samples that have a non-zero weight beyond their first token, in table order.

    All weights and advantages are zero at the first token. Raises PackingBreach if a path names an unknown message,
    streams of a sample differ in length, or a weighted token was sampled at temperature zero; BrokenGraph if a sample's
    trace is missing.
    """
    owner = owners(credits, traces, "credits")
    path = _message_rows(credits, messages)
    streams = {n: Ragged.of(messages[n]).take(path.values).merge(path.lengths) for n in ("token_ids", "logprobs")}
    for name in ("advantages", *(f"{component}_weights" for component in COMPONENTS)):
        streams[name] = _without_first(Ragged.of(credits[name]))
    lengths = streams["token_ids"].lengths
    for name, stream in streams.items():
        if not np.array_equal(stream.lengths, lengths):
            raise _mismatch(name, "is not as long as the tokens on its path")
    temperatures = np.repeat(traces["temperature"].to_numpy()[owner], lengths).astype(np.float32)
    streams["temperatures"] = Ragged.from_lengths(temperatures, lengths)
    samples = Samples(texts(credits["sample_id"]), texts(credits["group_id"]), streams)
    weighted = np.any([streams[f"{component}_weights"].values != 0 for component in COMPONENTS], axis=0)
    _check_temperature(samples, weighted)
    return samples.take(np.unique(streams["token_ids"].row_of_value[weighted]))


def _message_rows(credits: pa.Table, messages: pa.Table) -> Ragged:
    """Return, per sample, the rows of the messages on its path."""
    path = Ragged.of(credits["path"])
    known = pc.unique(credits["trace_id"])
    trace = pc.index_in(messages["trace_id"], value_set=known).fill_null(len(known)).to_numpy().astype(np.int64)
    trace_of_sample = pc.index_in(credits["trace_id"], value_set=known).to_numpy().astype(np.int64)
    number = messages["message"].to_numpy().astype(np.int64)
    # One integer for (trace, message), so that one sorted array is searched for all paths at once.
    stride = 1 + max(int(number.max(initial=0)), int(path.values.max(initial=0)))
    have = trace * stride + number
    want = trace_of_sample[path.row_of_value] * stride + path.values
    if not np.isin(want, have).all():
        raise _mismatch("path", "names a message that is not in table messages")
    order = np.argsort(have, kind="stable")
    return Ragged(order[np.searchsorted(have, want, sorter=order)], path.offsets)


def _without_first(stream: Ragged) -> Ragged:
    """Return the stream with a zero at the first token of every row."""
    values = stream.values.copy()
    values[stream.offsets[:-1][stream.lengths > 0]] = 0
    return Ragged(values, stream.offsets)


def _mismatch(column: str, what: str) -> PackingBreach:
    return PackingBreach(
        f"table credits, column {column}: a row {what}. Nothing was trained; all that was sampled is safe. "
        "Run the advantage stage again from the same traces."
    )


def _check_temperature(samples: Samples, weighted: npt.NDArray[np.bool_]) -> None:
    temperatures = samples.streams["temperatures"]
    wrong = np.flatnonzero(weighted & ~(temperatures.values > 0))
    if len(wrong):
        raise PackingBreach(
            f"table traces, column temperature: sample {samples.ids[temperatures.row_of_value[wrong[0]]]} was made at "
            f"temperature {temperatures.values[wrong[0]]:g}, which leaves no distribution to train on. Nothing was "
            "trained. Set rollout.temperature, and that of the environment, above zero."
        )

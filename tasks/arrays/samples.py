"""The samples of a step: the branches to be packed, with all per-token streams that a packed row is made of."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import texts
from tasks.arrays.message_graph import owners
from tasks.arrays.ragged import Integers, Ragged, places

COMPONENTS = ("rl", "ce", "ref_kl")


class PackingBreach(ValueError):
    """The tables do not fit together, or a sample did not end up in exactly one row."""


@dataclass(frozen=True)
class Samples:
    """All samples of a step, with the streams that become the per-token columns of batches, by column name."""

    ids: list[str]
    groups: list[str]
    owner: Integers
    """The trace row of each sample; shape [samples]."""
    offsets: Integers
    """Borders of the samples in every stream; shape [samples + 1]."""
    streams: dict[str, npt.NDArray[Any]]
    """Each flat; shape [tokens]."""
    weighted: Integers
    """The samples that have a non-zero weight beyond their first token."""

    @property
    def lengths(self) -> Integers:
        """Tokens of each sample; shape [samples]."""
        return np.diff(self.offsets)


def gather_samples(credits: pa.Table, messages: pa.Table, traces: pa.Table, zero_advantages: bool) -> Samples:
    """Return the samples in table order, with all weights and advantages zero at their first token.

    Without `zero_advantages`, rl weights are zero wherever the advantage is.
    Raises PackingBreach if a path names an unknown message, streams of a sample differ in length, or a weighted token
    was sampled at temperature zero; BrokenGraph if a sample's trace is missing.
    """
    owner = owners(credits, traces, "samples")
    path = message_rows(credits, messages)
    tokens = Ragged.of(messages["token_ids"])
    where, borders_of_messages = places(tokens.offsets, path.values)
    offsets = borders_of_messages[path.offsets]
    streams = {"token_ids": tokens.values[where], "logprobs": Ragged.of(messages["logprobs"]).values[where]}
    for name in ("advantages", *(f"{component}_weights" for component in COMPONENTS)):
        stream = Ragged.of(credits[name])
        # Checked for every stream: one that is shifted by a token would train on wrong advantages without any error.
        if not np.array_equal(stream.offsets, offsets):
            raise _mismatch(name, "is not as long as the tokens on its path")
        streams[name] = _without_first(stream)
    if not zero_advantages:
        streams["rl_weights"][streams["advantages"] == 0] = 0
    streams["temperatures"] = np.repeat(traces["temperature"].to_numpy()[owner], np.diff(offsets))
    member = np.any([streams[f"{component}_weights"] != 0 for component in COMPONENTS], axis=0)
    row = Ragged(member, offsets).row_of_value[member]
    _check_temperature(credits, row, streams["temperatures"][member])
    groups = texts(credits["group_id"])
    return Samples(texts(credits["sample_id"]), groups, owner, offsets, streams, np.unique(row))


def message_rows(credits: pa.Table, messages: pa.Table) -> Ragged:
    """Return, per sample, the rows of the messages on its path. Raises PackingBreach for one that is not there."""
    path = Ragged.of(credits["path"])
    known = pc.unique(credits["trace_id"])
    # Messages of traces without a sample get a number that no sample has.
    trace = pc.index_in(messages["trace_id"], value_set=known).fill_null(len(known)).to_numpy().astype(np.int64)
    trace_of_sample = pc.index_in(credits["trace_id"], value_set=known).to_numpy().astype(np.int64)
    number = messages["message"].to_numpy().astype(np.int64)
    # One integer for (trace, message), so that one sorted array is searched for all paths at once.
    stride = 1 + max(int(number.max(initial=0)), int(path.values.max(initial=0)))
    existing = trace * stride + number
    wanted = trace_of_sample[path.row_of_value] * stride + path.values
    if not np.isin(wanted, existing).all():
        raise _mismatch("path", "names a message that is not in table messages")
    order = np.argsort(existing, kind="stable")
    return Ragged(order[np.searchsorted(existing, wanted, sorter=order)], path.offsets)


def _without_first(stream: Ragged) -> npt.NDArray[Any]:
    """Return the flat stream with a zero at the first token of every row."""
    values = stream.values.copy()
    values[stream.offsets[:-1][stream.lengths > 0]] = 0
    return values


def _mismatch(column: str, what: str) -> PackingBreach:
    return PackingBreach(
        f"table samples, column {column}: a row {what}. Nothing was trained; all that was sampled is safe. "
        "Run the advantage stage again from the same traces."
    )


def _check_temperature(credits: pa.Table, sample: Integers, temperature: npt.NDArray[Any]) -> None:
    """Raise PackingBreach if a weighted token, of the sample given for each, was sampled at temperature zero."""
    wrong = np.flatnonzero(~(temperature > 0))  # also where it is NaN
    if len(wrong):
        raise PackingBreach(
            f"table traces, column temperature: sample {credits['sample_id'][int(sample[wrong[0]])]} was made at "
            f"temperature {temperature[wrong[0]]:g}, which leaves no distribution to train on. Nothing was trained. "
            "Set rollout.temperature, and that of the environment, above zero."
        )

"""The samples of a step: the branches to be packed, and the per-token streams that a packed row is made of.

Of all samples at once only what is small is held: ids, paths, lengths, numbers of weighted tokens. Their streams are
read a part at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import texts
from tasks.arrays.finding import Flags
from tasks.arrays.message_graph import owners
from tasks.arrays.ragged import Integers, Ragged, borders
from tasks.runtime.stored_rows import StoredRows

COMPONENTS = ("rl", "ce", "ref_kl")
WEIGHTS = tuple(f"{component}_weights" for component in COMPONENTS)
OF_SAMPLES = ("advantages", *WEIGHTS)
"""The streams that table samples has."""

Streams = dict[str, npt.NDArray[Any]]


class PackingBreach(ValueError):
    """The tables do not fit together, or a sample did not end up in exactly one row."""


@dataclass(frozen=True)
class Samples:
    """All samples of a step, in table order, without their streams."""

    ids: list[str]
    groups: list[str]
    owner: Integers
    """The trace row of each sample; shape [samples]."""
    path: Ragged
    """The rows of messages from root to leaf, for each sample."""
    within: Integers
    """Where each message of `path` begins in its sample; shape [elements of the paths]."""
    lengths: Integers
    """Tokens of each sample; shape [samples]."""
    prompts: Integers
    """Tokens of each sample before the first message that a model sampled; shape [samples]."""
    counts: dict[str, Integers]
    """Tokens of each sample with weight, by component, the first token aside; shape [samples]."""
    zero_advantages: bool
    """Whether rl tokens without advantage keep their weight."""

    @property
    def weighted(self) -> Integers:
        """The samples that have a non-zero weight beyond their first token."""
        found: Integers = np.flatnonzero(np.any([count > 0 for count in self.counts.values()], axis=0))
        return found

    def streams(self, rows: StoredRows) -> Iterator[tuple[int, Ragged, Streams]]:
        """Yield a part of the table's streams after another: the first sample's number, borders, streams by column."""
        first = 0
        for part in rows.parts(OF_SAMPLES):
            offsets, streams = weight_streams(part, self.zero_advantages)
            yield first, Ragged(streams["advantages"], offsets), streams
            first += part.num_rows


def gather_samples(credits: StoredRows, messages: StoredRows, traces: pa.Table, zero_advantages: bool) -> Samples:
    """Return the samples in table order.

    Raises PackingBreach if a path names an unknown message, streams of a sample differ in length, or a weighted token
    was sampled at temperature zero; BrokenGraph if a sample's trace is missing.
    """
    small = credits.table(["sample_id", "trace_id", "group_id", "path"])
    owner = owners(small, traces, "samples")
    names, num_tokens, sampled = _message_lengths(messages)
    path = message_rows(small, names)
    ends = borders(num_tokens[path.values])
    offsets = ends[path.offsets]
    within = ends[:-1] - np.repeat(offsets[:-1], path.lengths)
    lengths, answers = np.diff(offsets), sampled[path.values]
    prompts = lengths.copy()
    np.minimum.at(prompts, path.row_of_value[answers], within[answers])
    counts = {component: np.zeros(small.num_rows, np.int64) for component in COMPONENTS}
    temperature, first = traces["temperature"].to_numpy()[owner], 0
    for part in credits.parts(["sample_id", *OF_SAMPLES]):
        _check_streams(part, lengths[first : first + part.num_rows])
        own, streams = weight_streams(part, zero_advantages)
        row = Ragged(streams["advantages"], own).row_of_value
        for component, count in counts.items():
            weighted = row[streams[f"{component}_weights"] != 0]
            count[first : first + part.num_rows] = np.bincount(weighted, minlength=part.num_rows)
        member = row[np.any([streams[name] != 0 for name in WEIGHTS], axis=0)]
        _check_temperature(part, member, temperature[first + member])
        first += part.num_rows
    ids, groups = texts(small["sample_id"]), texts(small["group_id"])
    return Samples(ids, groups, owner, path, within, lengths, prompts, counts, zero_advantages)


def weight_streams(part: pa.Table, zero_advantages: bool) -> tuple[Integers, Streams]:
    """Return borders and streams of some samples, with all weights and advantages zero at their first token.

    Without `zero_advantages`, rl weights are zero wherever the advantage is.
    """
    ragged = {name: Ragged.of(part[name]) for name in OF_SAMPLES}
    streams = {name: _without_first(stream) for name, stream in ragged.items()}
    if not zero_advantages:
        streams["rl_weights"][streams["advantages"] == 0] = 0
    return ragged["advantages"].offsets, streams


def _message_lengths(messages: StoredRows) -> tuple[pa.Table, Integers, Flags]:
    """Return the names of all messages, how many tokens each has, and whether a model call sampled it."""
    names, lengths, sampled = [], [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)]
    for part in messages.parts(["trace_id", "message", "sampled", "mask"]):
        names.append(part.select(["trace_id", "message"]))
        sampled.append(part["sampled"].to_numpy())
        lengths.append(Ragged.of(part["mask"]).lengths)
    empty = messages.schema.empty_table().select(["trace_id", "message"])
    return pa.concat_tables([empty, *names]), np.concatenate(lengths), np.concatenate(sampled)


def _check_streams(part: pa.Table, lengths: Integers) -> None:
    """Raise PackingBreach unless every stream is as long as its sample."""
    for name in OF_SAMPLES:
        # Every stream: one that is shifted by a token would train on wrong advantages without any error.
        if not np.array_equal(Ragged.of(part[name]).lengths, lengths):
            raise _mismatch(name, "is not as long as the tokens on its path")


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

"""Packing: which samples share a row, on which rank and micro-step, in the layout that the learner maps."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from tempfile import TemporaryFile
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from configs.run import View, for_environment
from storage.schemas.contract import FLOATS, INDICES, NAMES, TOKENS
from storage.schemas.stage_tables import BATCH_EXPERTS, BATCHES, IMAGE_TENSORS
from tasks.arrays.columns import texts
from tasks.arrays.finding import QUARANTINED, UNTRAINABLE, Flags
from tasks.arrays.images import PlacedImage, SampleImages, StoredTensors, batch_images, can_see, show_images
from tasks.arrays.permutation import digest
from tasks.arrays.ragged import Integers, Ragged, borders
from tasks.arrays.samples import COMPONENTS, OF_SAMPLES, PackingBreach, Samples, gather_samples
from tasks.arrays.seats import JUDGE, OTHER_SEAT
from tasks.packing.bin_packing import Prompts, Rows, pack, pack_by_prompt
from tasks.runtime.prefect_task import as_task
from tasks.runtime.stage import Attempt, Outputs, Stage
from tasks.runtime.stored_rows import PART_BYTES, StoredRows, in_parts

UNCOUNTED = ("errored", UNTRAINABLE, QUARANTINED, JUDGE, OTHER_SEAT)
"""Reasons of verdicts on what is no rollout of the batch: it failed, was found unfit, or is not the policy's."""


def counted_rollouts(samples: Samples, traces: pa.Table, verdicts: pa.Table | None) -> Flags:
    """Return which traces count for a constant length: all that were scored, whatever a filter or a gate found.

    Without verdicts, where groups that teach nothing were replaced by others, those kept of groups that are trained.
    """
    if verdicts is None:
        trained = {samples.groups[sample] for sample in samples.weighted}
        found = np.zeros(traces.num_rows, np.bool_)
        found[samples.owner] = [group in trained for group in samples.groups]
    else:
        reasons = dict(zip(texts(verdicts["trace_id"]), verdicts["reason"].to_pylist(), strict=True))
        found = np.array([reasons[name] not in UNCOUNTED for name in texts(traces["trace_id"])], np.bool_)
    scored: Flags = traces["reward"].is_valid().to_numpy()
    return found & scored


def constant_length_factors(
    samples: Samples,
    updates: Sequence[Integers],
    traces: pa.Table,
    lengths: Mapping[str, int | None],
    counted: Flags,
) -> npt.NDArray[np.float64]:
    """Return N / D for each sample, by which its rl weights are multiplied; `updates` are their samples.

    N is the number of the update's weighted rl tokens, the denominator that the learner divides by. D counts each trace
    with rl weight of an environment in `lengths` for its constant length, whatever number of samples it has, and of
    other environments each weighted token. Traces that are `counted` without being in any update, as filters dropped
    them or their advantage is zero, count in equal shares in each. So the loss is sum(w x) / D: with one constant L and
    n rollouts made sum(w x) / (n L), as in Dr. GRPO (Liu et al. 2025, arXiv 2503.20783). A trace whose samples are in
    two updates counts in both.
    """
    counts_for = np.array([for_environment(lengths, name) or 0 for name in texts(traces["environment"])], np.int64)
    num_weighted = samples.counts["rl"]
    factor = np.ones(len(samples.ids))
    outside = counted.copy()
    outside[samples.owner[num_weighted > 0]] = False
    for members in updates:
        # A sample of another component alone has no part in the rl denominator.
        weighted = members[num_weighted[members] > 0]
        owner = samples.owner[weighted]
        denominator = num_weighted[weighted][counts_for[owner] == 0].sum() + counts_for[np.unique(owner)].sum()
        denominator += counts_for[outside].sum() / len(updates)
        factor[members] = num_weighted[weighted].sum() / max(denominator, 1)
    return factor


PADDING_TOKENS = 2
"""Length of a padding row: the shortest with a token to predict, so that an idle rank costs next to nothing."""


class BudgetTooSmall(ValueError):
    """A sample is longer than a packed row may be."""


@dataclass(frozen=True)
class PackingInputs:
    """The credited rollouts of a step."""

    samples: StoredRows
    messages: StoredRows
    traces: StoredRows
    verdicts: StoredRows | None = None
    """For constant lengths; None if groups with zero advantage were replaced."""
    image_tensors: StoredRows | None = None
    routed_experts: StoredRows | None = None
    """None where no experts were recorded."""

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        tables = attempt.rows("samples"), attempt.rows("messages"), attempt.rows("traces")
        optional = ("verdicts", "image_tensors", "routed_experts")
        return cls(*tables, *map(attempt.optional_rows, optional))


def packing(inputs: PackingInputs, config: View) -> Outputs:
    """Return the packed rows of one batch, split into `updates_per_step` updates; no rows if no sample has weight.

    Weights are zero at the first token of every segment, whose prediction would come from the sample before it. Samples
    without any weight left are not packed: they would cost compute and change nothing. The denominators count non-zero
    weights of the whole update and stand in each of its rows; where rollouts of an environment count for a constant
    length, the update's rl weights make up for the difference; they count whether a filter kept them or not, which is
    all that verdicts are read for. Rows come in parts of PART_BYTES. Raises BudgetTooSmall for a sample longer than a
    row, PackingBreach if the tables do not fit together or a sample is not in exactly one row.
    """
    settings, credits, messages = config.packing, inputs.samples, inputs.messages
    traces = inputs.traces.table(["trace_id", "environment", "temperature", "reward"])
    samples = gather_samples(credits, messages, traces, settings.zero_advantages)
    _check_budget(samples, settings.tokens_per_row)
    parts = list(updates(samples, settings.updates_per_step, config.pairs))
    factors = None
    if config.constant_lengths:
        verdicts = inputs.verdicts.table(["trace_id", "reason"]) if inputs.verdicts else None
        counted = counted_rollouts(samples, traces, verdicts)
        factors = constant_length_factors(samples, parts, traces, config.constant_lengths, counted)
    packed = list[PackedRow]()
    for number, members in enumerate(parts):
        sizes = samples.lengths[members].tolist(), settings.tokens_per_row, settings.data_parallel
        rows = pack_by_prompt(*sizes, _prompts(samples, members)) if settings.shared_prefixes else pack(*sizes)
        placed = [members[row].tolist() for row in rows]
        check_once(placed, members, samples.ids)
        packed += [PackedRow(number, place, tuple(row)) for place, row in enumerate(placed)]
    spool = TokenSpool(samples, packed)
    spool.take_samples(credits, factors)
    spool.take_messages(messages)
    tokens = {
        number: {name: int(count[own].sum()) for name, count in samples.counts.items()}
        for number, own in enumerate(parts)
    }
    temperatures = traces["temperature"].to_numpy()[samples.owner]
    table_of = partial(_table, samples, packed, spool, temperatures, tokens, settings.data_parallel)
    experts = spool.take_experts(inputs.routed_experts, messages) if inputs.routed_experts else None
    made: dict[str, Any] = {"batches": (table_of(*part) for part in spool.parts())}
    if experts:
        made["batch_experts"] = in_parts(experts)
    # Images without a map from tokens to types would be trained on as if they had been text.
    sees = any(map(can_see, inputs.traces.parts(["record"]))) or any(map(show_images, messages.parts(["body"])))
    return made | ({"batch_images": in_parts(_images(inputs, samples, packed))} if sees else {})


@dataclass(frozen=True)
class PackedRow:
    """A row of the batch."""

    update: int
    place: int
    """Its number within the update."""
    samples: tuple[int, ...]
    """The samples in it, in order; none in a padding row."""


class TokenSpool:
    """The per-token streams of packed rows, written in the order of the tables, read in the order of the rows.

    Large ones are files without a name, mapped into memory: a sample may lie anywhere in the tables.
    """

    def __init__(self, samples: Samples, rows: Sequence[PackedRow]) -> None:
        self._samples = samples
        self._tokens = [
            int(samples.lengths[list(row.samples)].sum()) if row.samples else PADDING_TOKENS for row in rows
        ]
        self.borders = borders(self._tokens)
        """Where each row begins; shape [rows + 1]."""
        self._start = np.full(len(samples.ids), -1, np.int64)
        """Where each packed sample begins; -1 for the others."""
        for row, begin in zip(rows, self.borders.tolist(), strict=False):
            lengths = samples.lengths[list(row.samples)]
            self._start[list(row.samples)] = begin + np.cumsum(lengths) - lengths
        self._streams = {name: _zeros(int(self.borders[-1]), kind) for name, kind in SPOOL_TYPES.items()}

    def take_samples(self, credits: StoredRows, factors: npt.NDArray[np.float64] | None) -> None:
        """Take the streams of table samples; rl weights are multiplied by the samples' factors."""
        for first, own, streams in self._samples.streams(credits):
            if factors is not None:
                factor = factors[first + own.row_of_value]
                streams["rl_weights"] = (streams["rl_weights"] * factor).astype(np.float32)
            starts = self._start[first : first + len(own.lengths)]
            for number in np.flatnonzero(starts >= 0).tolist():
                part = slice(*own.offsets[number : number + 2])
                self._write(int(starts[number]), {name: stream[part] for name, stream in streams.items()})

    def take_messages(self, messages: StoredRows) -> None:
        """Take tokens and log-probs of the messages on the samples' paths."""
        message_row, target = self._message_places()
        first = 0
        for part in messages.parts(["token_ids", "logprobs"]):
            own = {name: Ragged.of(part[name]) for name in ("token_ids", "logprobs")}
            begin, end = np.searchsorted(message_row, (first, first + part.num_rows)).tolist()
            places = zip((message_row[begin:end] - first).tolist(), target[begin:end].tolist(), strict=True)
            for number, place in places:
                part_of = {name: each.values[slice(*each.offsets[number : number + 2])] for name, each in own.items()}
                self._write(place, part_of)
            first += part.num_rows

    def _message_places(self) -> tuple[Integers, Integers]:
        """Return the messages of packed samples, by their rows in rising order, and where each begins in the stream."""
        path = self._samples.path
        starts = self._start[path.row_of_value]
        used = np.flatnonzero(starts >= 0)
        order = used[np.argsort(path.values[used], kind="stable")]
        return path.values[order], (starts + self._samples.within)[order]

    def take_experts(self, recorded: StoredRows, messages: StoredRows) -> Iterator[pa.Table] | None:
        """Take the experts of the messages on the samples' paths; return the rows of `batch_experts`, None for none.

        Raises PackingBreach where they are of several models.
        """
        sizes = recorded.table(EXPERT_SIZES)
        kinds = {tuple(size.values()) for size in sizes.to_pylist()}
        if len(kinds) > 1:
            raise PackingBreach(f"routed_experts: {EXPERT_SIZES} are not of one model: {sorted(kinds)}")
        if not kinds:
            return None
        (kind,) = kinds
        self._streams["experts"] = _zeros(int(self.borders[-1]), np.dtype((np.void, int(np.prod(kind)))))
        message_row, target = self._message_places()
        row_of = {name: row for row, name in enumerate(_names(messages.table(MESSAGE_NAME)))}
        for part in recorded.parts([*MESSAGE_NAME, "experts"]):
            contents: list[Any] = part["experts"].to_pylist()
            for name, experts in zip(_names(part), contents, strict=True):
                values = np.frombuffer(experts, self._streams["experts"].dtype)
                begin, end = np.searchsorted(message_row, (row_of[name], row_of[name] + 1)).tolist()
                for place in target[begin:end].tolist():
                    self._write(place, {"experts": values})
        return self._expert_rows(dict(zip(EXPERT_SIZES, kind, strict=True)))

    def parts(self) -> list[tuple[int, int]]:
        """Return the rows of the parts that are written together: the first, and the one behind the last."""
        found, limit = [0], PART_BYTES // TOKEN_BYTES
        for row, end in enumerate(self.borders[1:].tolist()):
            if end - self.borders[found[-1]] > limit and row > found[-1]:
                found.append(row)
        return list(pairwise([*found, len(self._tokens)]))

    def read(self, name: str, first: int, last: int) -> Ragged:
        """Return a stream of some rows; zeros in padding rows."""
        begin, end = self.borders[[first, last]].tolist()
        return Ragged(np.array(self._streams[name][begin:end]), self.borders[first : last + 1] - begin)

    def _expert_rows(self, sizes: Mapping[str, int]) -> Iterator[pa.Table]:
        for row in range(len(self._tokens)):
            experts = self.read("experts", row, row + 1).values.tobytes()
            yield pa.Table.from_pylist([{"row": row, **sizes, "experts": experts}], schema=BATCH_EXPERTS.arrow)

    def _write(self, place: int, streams: Mapping[str, npt.NDArray[Any]]) -> None:
        for name, values in streams.items():
            self._streams[name][place : place + len(values)] = values


def _names(messages: pa.Table) -> Iterator[tuple[str, int]]:
    numbers: list[Any] = messages["message"].to_pylist()
    return zip(texts(messages["trace_id"]), numbers, strict=True)


def _zeros(count: int, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    size = count * np.dtype(kind).itemsize
    if size <= SPOOLED:
        return np.zeros(count, kind)
    with TemporaryFile() as file:  # it is gone with the array
        # A full disk is an error of this call; at a page without a block it would be a signal that ends the process.
        os.posix_fallocate(file.fileno(), 0, size)
        return np.memmap(file, kind, "r+", shape=count)


SPOOLED = 1 << 25
"""Bytes of one stream that stay in memory."""
SPOOL_TYPES = {"token_ids": np.int32, "logprobs": np.float32} | dict.fromkeys(OF_SAMPLES, np.float32)
TOKEN_BYTES = 28
"""Of a packed token: an id and six numbers."""


MESSAGE_NAME = ["trace_id", "message"]
EXPERT_SIZES = ["width", "num_layers", "top_k"]
"""The columns of experts that are the same in all rows."""
MOST_IMAGE_TOKENS = 4096
"""Tokens of images whose tensors are written together: some 25 kB for each."""


def _images(inputs: PackingInputs, samples: Samples, packed: Sequence[PackedRow]) -> Iterator[pa.Table]:
    """Yield the rows of `batch_images`, where there is any image.

    An image's tensors are stored once for a batch, however many samples have it. Raises ImageBreach where tokens do not
    fit the images of their message.
    """
    traces = inputs.traces.table(["trace_id", "group_id", "record"])
    tensors = StoredTensors(inputs.image_tensors or StoredRows.of(IMAGE_TENSORS.arrow.empty_table()))
    # Of rollouts with images, all else is small.
    columns = ["trace_id", "message", "body", "token_ids", "mask"]
    images = SampleImages(inputs.messages.table(columns), traces, tensors.num_tokens)
    known, held, size = set[str](), list[list[PlacedImage]](), 0
    for number, row in enumerate(packed):
        begin, placed = 0, list[PlacedImage]()
        for sample in row.samples:
            path = samples.path.values[slice(*samples.path.offsets[sample : sample + 2])]
            placed += [image._replace(offset=begin + image.offset) for image in images.along(path.tolist())]
            begin += int(samples.lengths[sample])
        held.append(placed)
        size += sum(image.num_tokens for image in placed)
        if size > MOST_IMAGE_TOKENS or number + 1 == len(packed):
            made = batch_images(held, number + 1 - len(held), tensors, known)
            if made.num_rows:
                yield made
            held, size = [], 0


def updates(samples: Samples, num_updates: int, whole_groups: bool = False) -> Iterator[Integers]:
    """Yield the weighted samples of each update: equal numbers, up to one, in the hash order of their groups.

    So a group is split only where the border falls, and updates do not follow the order in which groups finished,
    which would give the first one the short rollouts. With fewer samples than updates, there are fewer updates. With
    `whole_groups` no group is split, and numbers are of groups.
    """
    order = sorted(samples.weighted.tolist(), key=lambda sample: (digest("update", samples.groups[sample]), sample))
    units = [[sample] for sample in order]
    if whole_groups:
        units = [[*members] for _, members in groupby(order, samples.groups.__getitem__)]
    for part in np.array_split(np.arange(len(units)), num_updates):
        if len(part):
            yield np.concatenate([units[unit] for unit in part])


def _prompts(samples: Samples, members: Integers) -> Prompts:
    # Tokens are not read for it: of prompts of one length in a group that differ, the learner computes each.
    tokens = samples.prompts[members]
    _, groups = np.unique([samples.groups[sample] for sample in members], return_inverse=True)
    _, alike = np.unique(groups * (1 + tokens.max()) + tokens, return_inverse=True)
    return Prompts(alike, tokens)


def check_once(rows: Rows, members: Integers, sample_ids: list[str]) -> None:
    """Raise PackingBreach unless every member is in exactly one row."""
    placed = np.array([sample for row in rows for sample in row], np.int64)
    times = np.bincount(placed, minlength=len(sample_ids))[members]
    if (times != 1).any():
        wrong = int(np.argmax(times != 1))
        raise PackingBreach(
            f"table batches, column sample_ids: sample {sample_ids[members[wrong]]} is in {times[wrong]} rows, not in "
            "one. Nothing was trained; the samples are safe in table samples."
        )


def _check_budget(samples: Samples, budget: int) -> None:
    too_long = samples.weighted[samples.lengths[samples.weighted] > budget]
    if len(too_long):
        longest = too_long[np.argmax(samples.lengths[too_long])]
        raise BudgetTooSmall(
            f"sample {samples.ids[longest]} has {samples.lengths[longest]} tokens, but packing.tokens_per_row is "
            f"{budget} ({len(too_long)} of {len(samples.weighted)} samples are too long). Nothing was trained; traces "
            f"and samples are safe. Set packing.tokens_per_row to {samples.lengths[longest]} or more, or shorten the "
            "rollouts: engine.max_model_len bounds prompt and completion, max_turns the number of turns."
        )


def _table(
    samples: Samples,
    packed: Sequence[PackedRow],
    spool: TokenSpool,
    temperatures: npt.NDArray[np.float32],
    tokens: Mapping[int, Mapping[str, int]],
    num_ranks: int,
    first: int,
    last: int,
) -> pa.Table:
    """Return some rows; row `i` of an update goes to rank `i % num_ranks` at micro-step `i // num_ranks`."""
    rows = packed[first:last]
    segments = [borders(samples.lengths[list(row.samples)] if row.samples else [PADDING_TOKENS]) for row in rows]
    places = np.array([row.place for row in rows], np.int64)
    columns = {
        "row": pa.array(np.arange(first, last), pa.int32()),
        "update": pa.array([row.update for row in rows], pa.int32()),
        "rank": pa.array(places % num_ranks, pa.int32()),
        "micro_step": pa.array(places // num_ranks, pa.int32()),
        "sample_ids": pa.array([[samples.ids[sample] for sample in row.samples] for row in rows], NAMES),
        "cu_seqlens": Ragged.from_lengths(_flat(segments), [len(each) for each in segments]).arrow(INDICES),
        # Logits are divided by the temperature, of padding too.
        "temperatures": _temperatures(samples, rows, temperatures).arrow(FLOATS),
    }
    for name in SPOOL_TYPES:
        columns[name] = spool.read(name, first, last).arrow(TOKENS if name == "token_ids" else FLOATS)
    for name in COMPONENTS:
        # The denominator is that of the whole update, and stands in each row: a rank sees its own rows alone.
        columns[f"{name}_tokens"] = pa.array([tokens[row.update][name] for row in rows], pa.int64())
    return pa.table({name: columns[name] for name in BATCHES.arrow.names}, schema=BATCHES.arrow)


def _temperatures(samples: Samples, rows: Sequence[PackedRow], temperatures: npt.NDArray[np.float32]) -> Ragged:
    own = [np.array(row.samples, np.int64) for row in rows]
    parts = [np.repeat(temperatures[each], samples.lengths[each]) for each in own]
    padding = np.ones(PADDING_TOKENS, temperatures.dtype)
    parts = [part if len(each) else padding for part, each in zip(parts, own, strict=True)]
    return Ragged.from_lengths(_flat(parts), [len(part) for part in parts])


def _flat(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0)


STAGE = Stage(
    name="packing",
    version=1,
    reads=("samples", "messages", "traces"),
    writes=("batches", "batch_images", "batch_experts"),
    sections=("packing", "constant_lengths", "pairs"),
    read_inputs=PackingInputs.read,
    function=packing,
    optional=("verdicts", "image_tensors", "routed_experts", "batch_images", "batch_experts"),
)
task = as_task(STAGE)

"""Packing: which samples share a row, on which rank and micro-step, in the layout that the learner maps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from configs.run import View, for_environment
from storage.schemas.contract import FLOATS, INDICES, NAMES, TOKENS
from storage.schemas.stage_tables import BATCH_IMAGES, BATCHES, IMAGE_TENSORS
from tasks.arrays.columns import texts
from tasks.arrays.finding import QUARANTINED, UNTRAINABLE, Flags
from tasks.arrays.images import PlacedImage, SampleImages, batch_images, can_see
from tasks.arrays.permutation import digest
from tasks.arrays.ragged import Integers, Ragged, borders, places
from tasks.arrays.samples import PackingBreach, Samples, gather_samples, message_rows
from tasks.arrays.seats import JUDGE, OTHER_SEAT
from tasks.packing.bin_packing import Rows, pack
from tasks.runtime.prefect_task import as_task
from tasks.runtime.stage import Stage, Tables

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


def by_constant_length(
    samples: Samples,
    updates: Sequence[Integers],
    traces: pa.Table,
    lengths: Mapping[str, int | None],
    counted: Flags,
) -> Samples:
    """Return the samples with the rl weights of each update multiplied by N / D; `updates` are their samples.

    N is the number of the update's weighted rl tokens, the denominator that the learner divides by. D counts each trace
    with rl weight of an environment in `lengths` for its constant length, whatever number of samples it has, and of
    other environments each weighted token. Traces that are `counted` without being in any update, as filters dropped
    them or their advantage is zero, count in equal shares in each. So the loss is sum(w x) / D: with one constant L and
    n rollouts made sum(w x) / (n L), as in Dr. GRPO (Liu et al. 2025, arXiv 2503.20783). A trace whose samples are in
    two updates counts in both.
    """
    counts_for = np.array([for_environment(lengths, name) or 0 for name in texts(traces["environment"])], np.int64)
    row = Ragged(samples.streams["rl_weights"], samples.offsets).row_of_value
    num_weighted = np.bincount(row[samples.streams["rl_weights"] != 0], minlength=len(samples.ids))
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
    scaled = (samples.streams["rl_weights"] * factor[row]).astype(np.float32)
    return replace(samples, streams=samples.streams | {"rl_weights": scaled})


PADDING_TOKENS = 2
"""Length of a padding row: the shortest with a token to predict, so that an idle rank costs next to nothing."""


class BudgetTooSmall(ValueError):
    """A sample is longer than a packed row may be."""


def packing(tables: Tables, config: View) -> Tables:
    """Return the packed rows of one batch, split into `updates_per_step` updates; no rows if no sample has weight.

    Weights are zero at the first token of every segment, whose prediction would come from the sample before it. Samples
    without any weight left are not packed: they would cost compute and change nothing. The denominators count non-zero
    weights of the whole update and stand in each of its rows; where rollouts of an environment count for a constant
    length, the update's rl weights make up for the difference; they count whether a filter kept them or not, which is
    all that verdicts are read for. Raises BudgetTooSmall for a sample longer than a row, PackingBreach if the tables do
    not fit together or a sample is not in exactly one row.
    """
    settings = config.packing
    samples = gather_samples(tables["samples"], tables["messages"], tables["traces"], settings.zero_advantages)
    _check_budget(samples, settings.tokens_per_row)
    parts = list(updates(samples, settings.updates_per_step))
    if config.constant_lengths:
        counted = counted_rollouts(samples, tables["traces"], tables.get("verdicts"))
        samples = by_constant_length(samples, parts, tables["traces"], config.constant_lengths, counted)
    batches = [BATCHES.arrow.empty_table()]
    images = ImagePacker(tables, samples) if can_see(tables["traces"]) else None
    for number, members in enumerate(parts):
        lengths = samples.lengths[members].tolist()
        placed = pack(lengths, settings.tokens_per_row, settings.data_parallel)
        rows = [members[row].tolist() for row in placed]
        check_once(rows, members, samples.ids)
        first = sum(batch.num_rows for batch in batches)
        batches.append(_batch(samples, rows, number, first, settings.data_parallel))
        if images:
            images.add(rows, first)
    return {"batches": pa.concat_tables(batches), **(images.tables() if images else {})}


class ImagePacker:
    """Finds the images of packed rows; an image's tensors are stored once for a batch, however many samples have it."""

    def __init__(self, tables: Tables, samples: Samples) -> None:
        self._tensors = tables.get("image_tensors", IMAGE_TENSORS.arrow.empty_table())
        self._images = SampleImages(tables["messages"], tables["traces"], self._tensors)
        self._paths = message_rows(tables["samples"], tables["messages"])
        self._lengths = samples.lengths
        self._known = set[str]()
        self._made = list[pa.Table]()

    def add(self, rows: Rows, first_row: int) -> None:
        """Add the images of packed rows, numbered from `first_row`; raises ImageBreach where tokens do not fit them."""
        self._made.append(batch_images([list(self._of(row)) for row in rows], first_row, self._tensors, self._known))

    def tables(self) -> Tables:
        """Return the table `batch_images`, where there is any image."""
        made = pa.concat_tables(self._made) if self._made else BATCH_IMAGES.arrow.empty_table()
        return {"batch_images": made} if made.num_rows else {}

    def _of(self, row: list[int]) -> Iterator[PlacedImage]:
        begin = 0
        for sample in row:
            path = self._paths.values[slice(*self._paths.offsets[sample : sample + 2])]
            for image in self._images.along(path.tolist()):
                yield image._replace(offset=begin + image.offset)
            begin += int(self._lengths[sample])


def updates(samples: Samples, num_updates: int) -> Iterator[Integers]:
    """Yield the weighted samples of each update: equal numbers, up to one, in the hash order of their groups.

    So a group is split only where the border falls, and updates do not follow the order in which groups finished,
    which would give the first one the short rollouts. With fewer samples than updates, there are fewer updates.
    """
    order = sorted(samples.weighted.tolist(), key=lambda sample: (digest("update", samples.groups[sample]), sample))
    for part in np.array_split(np.array(order, np.int64), num_updates):
        if len(part):
            yield part


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


def _batch(samples: Samples, rows: Rows, update: int, first_row: int, num_ranks: int) -> pa.Table:
    """Return the rows of one update; row `i` goes to rank `i % num_ranks` at micro-step `i // num_ranks`."""
    segments = [borders(samples.lengths[row] if row else [PADDING_TOKENS]) for row in rows]
    numbers = np.arange(len(rows))
    columns = {
        "row": pa.array(first_row + numbers, pa.int32()),
        "update": pa.array(np.full(len(rows), update), pa.int32()),
        "rank": pa.array(numbers % num_ranks, pa.int32()),
        "micro_step": pa.array(numbers // num_ranks, pa.int32()),
        "sample_ids": pa.array([[samples.ids[sample] for sample in row] for row in rows], NAMES),
        "cu_seqlens": Ragged.from_lengths(np.concatenate(segments), [len(each) for each in segments]).arrow(INDICES),
    }
    for name, stream in _streams(samples, rows).items():
        columns[name] = stream.arrow(TOKENS if name == "token_ids" else FLOATS)
        # The denominator is that of the whole update, and stands in each row: a rank sees its own rows alone.
        if name.endswith("_weights"):
            counted = np.full(len(rows), np.count_nonzero(stream.values), np.int64)
            columns[f"{name.removesuffix('_weights')}_tokens"] = pa.array(counted)
    return pa.table({name: columns[name] for name in BATCHES.arrow.names}, schema=BATCHES.arrow)


def _streams(samples: Samples, rows: Rows) -> dict[str, Ragged]:
    """Return the per-token columns, a row after the other; rows without samples come last, as `pack` leaves them."""
    where, _ = places(samples.offsets, [sample for row in rows for sample in row])
    tokens_in_row = [int(samples.lengths[row].sum()) if row else PADDING_TOKENS for row in rows]
    num_padding = sum(tokens_in_row) - len(where)
    streams = {}
    for name, values in samples.streams.items():
        # Logits are divided by the temperature, of padding too.
        padding = np.full(num_padding, 1 if name == "temperatures" else 0, values.dtype)
        streams[name] = Ragged.from_lengths(np.concatenate((values[where], padding)), tokens_in_row)
    return streams


STAGE = Stage(
    name="packing",
    version=1,
    reads=("samples", "messages", "traces"),
    writes=("batches", "batch_images"),
    sections=("packing", "constant_lengths"),
    function=packing,
    optional=("verdicts", "image_tensors", "batch_images"),
)
task = as_task(STAGE)

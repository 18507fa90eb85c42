"""Reads packed rows from the table `batches` as arrays, and checks whatever would silently spoil a gradient."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.images import Tensor, attached_tensors
from tasks.arrays.samples import COMPONENTS
from tasks.learner.protocol import LearnerError
from tasks.learner.vision import RowImages, row_images

STREAMS = ("logprobs", "temperatures", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Row:
    """One packed row of T tokens; every stream is a float32 array (T,)."""

    row: int
    sample_ids: tuple[str, ...]
    borders: tuple[int, ...]
    """Segment borders: 0, then the running sum of segment lengths up to T."""
    token_ids: Array
    streams: dict[str, Array]
    images: RowImages | None = None
    """What the row shows; None for a row of text alone."""
    weighted: Array = field(init=False)
    """Positions of the tokens with weight in any component, int64 (N,); never the first of a segment."""

    def __post_init__(self) -> None:
        member = np.logical_or.reduce([self.streams[f"{name}_weights"] != 0 for name in COMPONENTS])
        object.__setattr__(self, "weighted", np.flatnonzero(member))

    def positions(self) -> Array:
        """Return position ids that restart at every segment, int64 (T,)."""
        starts = np.asarray(self.borders[:-1], np.int64)
        return np.arange(self.borders[-1]) - np.repeat(starts, np.diff(self.borders))

    def part(self, rank: int = 0, num_ranks: int = 1) -> "RowPart":
        """Return what one of the ranks that share this row computes: consecutive tokens, of each rank equally many."""
        padding = -len(self.token_ids) % num_ranks
        # A segment of its own, so that no sample attends to it.
        borders = (*self.borders, self.borders[-1] + padding) if padding else self.borders
        length = borders[-1] // num_ranks
        start, end = rank * length, (rank + 1) * length
        # A token is predicted by the one before it, and belongs to the rank that has that one.
        first, last = np.searchsorted(self.weighted, (start + 1, end + 1)).tolist()
        return RowPart(
            np.pad(self.token_ids, (0, padding))[start : end + 1],
            np.append(self.positions(), np.arange(padding))[start:end],
            borders,
            self.weighted[first:last] - start,
            slice(first, last),
        )


@dataclass(frozen=True)
class RowPart:
    """A rank's part of a row whose length is, with padding, a multiple of the number of ranks."""

    token_ids: Array
    """Its tokens, int64 (t,), and behind them the one that its last token predicts, where there is one."""
    positions: Array
    """Position ids of its tokens, int64 (t,)."""
    borders: tuple[int, ...]
    """Borders of the segments of the whole row, the padding's included."""
    selected: Array
    """Where in `token_ids` the weighted tokens are that its tokens predict, int64 (n,)."""
    own: slice
    """Where these are among all weighted tokens of the row."""


@dataclass(frozen=True)
class PackedBatch:
    """All rows of one optimizer step with the global denominators of the three components."""

    rows: tuple[Row, ...]
    denominators: dict[str, int]

    def on_rank(self, rank: int, num_ranks: int) -> list[Row]:
        """Return the rank's rows, one for each micro-step of the batch; an idle row where it has none.

        Rows are dealt in turn, whatever number of ranks the batch was packed for: they come costliest first, so that
        those of one micro-step cost about the same.
        """
        own = list(self.rows[rank::num_ranks])
        return own + [idle_row()] * (-(-len(self.rows) // num_ranks) - len(own))


def idle_row() -> Row:
    """Return two tokens without weight: a rank with nothing to do still takes part in every collective."""
    streams = {name: np.zeros(2, np.float32) for name in STREAMS} | {"temperatures": np.ones(2, np.float32)}
    return Row(-1, (), (0, 2), np.zeros(2, np.int64), streams)


def batches_from_table(table: pa.Table) -> list[PackedBatch]:
    """Return the checked rows of the table `batches`: one PackedBatch for each optimizer step, in order.

    Raises LearnerError naming row and column when streams differ in length, borders do not span the row, a value is not
    finite, a temperature is not positive, the first token of a segment has weight, a token has both rl and ref_kl
    weight, or a denominator is not the number of weighted tokens.
    """
    if not table.num_rows:
        raise LearnerError("batches: no rows; nothing was trained")
    # Of the whole table: an update may show what an earlier one brought.
    tensors = attached_tensors(table) if "images" in table.column_names else {}
    updates = np.unique(table["update"].to_numpy()).tolist()
    if updates != list(range(len(updates))):
        raise LearnerError(f"batches: updates {updates} are not numbered from 0 without gaps")
    return [_batch(table.filter(pc.equal(table["update"], update)), tensors) for update in updates]


def _batch(table: pa.Table, tensors: dict[str, list[Tensor]]) -> PackedBatch:
    lists = {name: table[name].combine_chunks() for name in ("token_ids", *STREAMS)}
    plain = table.select(["row", "sample_ids", "cu_seqlens"]).to_pylist()
    shown = [row.as_py() for row in table["images"]] if "images" in table.column_names else [None] * len(plain)
    rows = tuple(
        _row(record, {name: column[index].values.to_numpy() for name, column in lists.items()}, shown[index], tensors)
        for index, record in enumerate(plain)
    )
    for row in rows:
        _check_row(row)
    return PackedBatch(rows, _denominators(table, rows))


def _row(
    record: dict[str, Any],
    arrays: dict[str, Array],
    shown: list[dict[str, Any]] | None,
    tensors: dict[str, list[Tensor]],
) -> Row:
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise LearnerError(f"batches row {record['row']}: per-token columns differ in length: {lengths}")
    borders = tuple(record["cu_seqlens"])
    if len(borders) < 2 or borders[0] != 0 or borders[-1] != lengths["token_ids"] or (np.diff(borders) <= 0).any():
        raise LearnerError(
            f"batches row {record['row']}: cu_seqlens {borders} does not rise from 0 to {lengths['token_ids']} tokens"
        )
    return Row(
        record["row"],
        tuple(record["sample_ids"]),
        borders,
        arrays["token_ids"].astype(np.int64),
        {name: arrays[name].astype(np.float32) for name in STREAMS},
        row_images(f"batches row {record['row']}", shown, tensors) if shown else None,
    )


def _check_row(row: Row) -> None:
    where = f"batches row {row.row}"
    for name, stream in row.streams.items():
        # Other tokens' values are never used: prompts have no log-probs, and may have anything in their place.
        if not np.isfinite(stream[row.weighted]).all():
            raise LearnerError(f"{where}: {name} is not finite on a weighted token")
    if (row.streams["temperatures"][row.weighted] <= 0).any():
        raise LearnerError(f"{where}: temperatures must be positive on weighted tokens; greedy samples cannot train")
    if np.isin(row.weighted, row.borders[:-1]).any():
        raise LearnerError(f"{where}: the first token of a segment has weight, but nothing in its segment predicts it")
    if (row.streams["rl_weights"] * row.streams["ref_kl_weights"] != 0).any():
        raise LearnerError(f"{where}: a token has rl and ref_kl weight, but the advantages column carries one signal")
    if row.sample_ids and len(row.sample_ids) != len(row.borders) - 1:
        raise LearnerError(f"{where}: {len(row.sample_ids)} sample_ids for {len(row.borders) - 1} segments")
    if not row.sample_ids and row.weighted.size:
        raise LearnerError(f"{where}: a padding row (no sample_ids) has weighted tokens")


def _denominators(table: pa.Table, rows: tuple[Row, ...]) -> dict[str, int]:
    counted = {name: sum(int(np.count_nonzero(row.streams[f"{name}_weights"])) for row in rows) for name in COMPONENTS}
    for name, count in counted.items():
        # Stated in every row by the stage that packs, and counted again: a wrong one scales the gradient unseen.
        stated = np.unique(table[f"{name}_tokens"].to_numpy()).tolist()
        if stated != [count]:
            raise LearnerError(f"batches: {name}_tokens says {stated}, but {count} tokens have {name} weight")
    if not any(counted.values()):
        raise LearnerError("batches: no token has weight in any component; nothing was trained")
    return counted

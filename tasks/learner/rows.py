"""Reads packed rows out of the store as arrays, and checks whatever would silently spoil a gradient.

A rank holds the plan of the whole batch, which is small, and one row: those that it trains it reads one after another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from storage.errors import StoreError
from storage.refs import Slice
from tasks.arrays.images import TENSORS, Tensor
from tasks.arrays.samples import COMPONENTS
from tasks.learner.prefixes import Array, SharedPrefixes, shared_prefixes
from tasks.learner.protocol import BatchReference, LearnerError
from tasks.learner.vision import RowImages, row_images

if TYPE_CHECKING:  # a device is checked and measured where no library of the store is installed
    from storage.read.groups import Group, GroupReader

STREAMS = ("logprobs", "temperatures", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")


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
    experts: Array | None = None
    """The recorded experts of each token, (T, layers, k), 0 of a token without; None where none are recorded."""
    weighted: Array = field(init=False)
    """Positions of the tokens with weight in any component, int64 (N,); never the first of a segment."""

    def __post_init__(self) -> None:
        member = np.logical_or.reduce([self.streams[f"{name}_weights"] != 0 for name in COMPONENTS])
        object.__setattr__(self, "weighted", np.flatnonzero(member))

    @property
    def num_tokens(self) -> int:
        """Its tokens, T."""
        return self.borders[-1]

    @property
    def num_weighted(self) -> int:
        """Tokens with weight in any component."""
        return len(self.weighted)

    @property
    def once(self) -> tuple[int, ...]:
        """Borders of what is computed of each segment where prefixes are shared."""
        return self.shared.borders if self.shared else self.borders

    def positions(self) -> Array:
        """Return position ids that restart at every segment, int64 (T,)."""
        starts = np.asarray(self.borders[:-1], np.int64)
        return np.arange(self.borders[-1]) - np.repeat(starts, np.diff(self.borders))

    @cached_property
    def shared(self) -> SharedPrefixes | None:
        """What its segments have in common; None where it is little, and of a row that shows images."""
        return shared_prefixes(self.token_ids, self.borders) if self.images is None else None

    def part(self, rank: int = 0, num_ranks: int = 1, shares: bool = False) -> "RowPart":
        """Return what one of the ranks that share this row computes: consecutive tokens, of each rank equally many.

        A rank alone computes what segments have in common once, where it `shares` prefixes.
        """
        if shares and num_ranks == 1 and self.shared:
            return self._once(self.shared)
        padding = -len(self.token_ids) % num_ranks
        # A segment of its own, so that no sample attends to it.
        borders = (*self.borders, self.borders[-1] + padding) if padding else self.borders
        length = borders[-1] // num_ranks
        start, end = rank * length, (rank + 1) * length
        # A token is predicted by the one before it, and belongs to the rank that has that one.
        first, last = np.searchsorted(self.weighted, (start + 1, end + 1)).tolist()
        weighted = self.weighted[first:last]
        experts = self.experts
        if experts is not None:
            experts = np.pad(experts, ((0, padding), (0, 0), (0, 0)))[start:end]
        return RowPart(
            np.pad(self.token_ids, (0, padding))[start:end],
            np.append(self.positions(), np.arange(padding))[start:end],
            borders,
            weighted - 1 - start,
            self.token_ids[weighted],
            slice(first, last),
            experts=experts,
        )

    def _once(self, shared: SharedPrefixes) -> "RowPart":
        tokens, positions = self.token_ids[shared.computed], self.positions()[shared.computed]
        predictors, targets = shared.places[self.weighted - 1], self.token_ids[self.weighted]
        experts = None if self.experts is None else self.experts[shared.computed]
        return RowPart(tokens, positions, self.borders, predictors, targets, slice(0, len(targets)), shared, experts)


@dataclass(frozen=True)
class RowPart:
    """A rank's part of a row whose length is, with padding, a multiple of the number of ranks."""

    token_ids: Array
    """The tokens that it computes, int64 (t,)."""
    positions: Array
    """Their position ids, int64 (t,)."""
    borders: tuple[int, ...]
    """Borders of the segments of the whole row, the padding's included."""
    predictors: Array
    """Where in `token_ids` the tokens are that predict a weighted one, int64 (n,)."""
    targets: Array
    """The weighted tokens that they predict, int64 (n,)."""
    own: slice
    """Where these are among all weighted tokens of the row."""
    shared: SharedPrefixes | None = None
    """Which tokens of the row these are, where it has some once that begin several segments."""
    experts: Array | None = None
    """See `Row.experts`; of these tokens."""


@dataclass(frozen=True)
class RowPlan:
    """What every rank knows of a packed row, so that one of them reads it."""

    row: int
    update: int
    sample_ids: tuple[str, ...]
    borders: tuple[int, ...]
    """See `Row.borders`."""
    once: tuple[int, ...]
    """Borders of what is computed of each segment where prefixes are shared; `borders` where there is nothing to."""
    num_weighted: int
    """Tokens with weight in any component."""
    weighted: dict[str, int]
    """Tokens with weight in each component."""
    stated: dict[str, int]
    """The denominators of its update that the row states."""
    group: "Group"
    """Where it is stored."""
    place: int
    """Its place in that group."""

    @property
    def num_tokens(self) -> int:
        """Its tokens, T."""
        return self.borders[-1]


@dataclass(frozen=True)
class PackedBatch:
    """All rows of one optimizer step, with the global denominators of the three components.

    What is held is their plan: a row itself is read when its turn comes.
    """

    plan: Sequence[RowPlan]
    denominators: dict[str, int]
    load: Callable[[RowPlan], Row]

    def on_rank(self, rank: int, num_ranks: int) -> list[RowPlan | None]:
        """Return the plan of the rank's rows, one for each micro-step of the batch; None where it has none.

        Rows are dealt in turn, whatever number of ranks the batch was packed for: they come costliest first, so that
        those of one micro-step cost about the same.
        """
        own: list[RowPlan | None] = list(self.plan[rank::num_ranks])
        return own + [None] * (-(-len(self.plan) // num_ranks) - len(own))


def idle_row() -> Row:
    """Return two tokens without weight: a rank with nothing to do still takes part in every collective."""
    streams = {name: np.zeros(2, np.float32) for name in STREAMS} | {"temperatures": np.ones(2, np.float32)}
    return Row(-1, (), (0, 2), np.zeros(2, np.int64), streams)


MOST_TENSORS = 1 << 27
"""Bytes of images that stay in memory: rollouts of one task show the same ones, in rows that follow each other."""


class BatchReader:
    """Reads the packed rows of a batch, each rank those that it trains."""

    def __init__(self, groups: "GroupReader", batch: BatchReference) -> None:
        self._groups, self._batch = groups, batch
        self._images: dict[int, list[ImagePlan]] = {}
        """The images of each row that shows any, in the order of their tokens."""
        self._stored: dict[str, tuple[Group, int]] = {}
        """Where the tensors of an image are, by its digest."""
        self._tensors: dict[str, list[Tensor]] = {}
        self._experts: dict[int, tuple[Group, int]] = {}
        """Where the experts of a row are."""

    def plan(
        self,
        rank: int = 0,
        gather: Callable[[Any], list[Any]] = lambda part: [part],
        num_ranks: int = 1,
        check: Callable[[Row], None] = lambda row: None,
        beat: Callable[[], None] = lambda: None,
    ) -> list[PackedBatch]:
        """Verify and check all rows, each rank those of some slices; return a PackedBatch for each optimizer step.

        All ranks must call this together, with the same batch: what each finds is gathered. `check` is called with each
        row, and `beat` after each group of them.
        Raises on every rank what one of them met: DamagedSlice for files that are not what was written; LearnerError
        naming row and column when streams differ in length, borders do not span the row, a value is not finite, a
        temperature is not positive, the first token of a segment has weight, a token has both rl and ref_kl weight, or
        a denominator is not the number of weighted tokens.
        """

        def all_of(pieces: Sequence[Slice], found_in: "Callable[[Group, pa.Table], list[Any]]") -> list[Any]:
            own = {number: self._read(pieces[number], found_in, beat) for number in range(rank, len(pieces), num_ranks)}
            found = {number: part for each in gather(own) for number, part in each.items()}
            return [each for number in sorted(found) for each in _or_raise(found[number])]

        for image in all_of(self._batch.images, _image_plans):
            self._images.setdefault(image.row, []).append(image)
            if image.has_tensors:
                self._stored[image.digest] = image.group, image.number
        self._experts = dict(all_of(self._batch.experts, _expert_places))
        for images in self._images.values():
            images.sort(key=lambda image: image.place)

        def plan_rows(group: "Group", table: pa.Table) -> list[RowPlan]:
            rows = [self._row(table, place) for place in range(table.num_rows)]
            for row in rows:
                _check_row(row)
                check(row)
            return [_plan_of(row, table, group, place) for place, row in enumerate(rows)]

        return self._batches(all_of(self._batch.rows, plan_rows))

    def load(self, plan: RowPlan) -> Row:
        """Return a planned row."""
        return self._row(self._groups.read(plan.group), plan.place)

    def _read(
        self, piece: Slice, found_in: "Callable[[Group, pa.Table], list[Any]]", beat: Callable[[], None]
    ) -> list[Any] | Exception:
        found: list[Any] = []
        try:
            for group, table in self._groups.verify(piece):
                found += found_in(group, table)
                beat()
        except (StoreError, LearnerError) as error:  # the other ranks must get it, or they wait for ever
            return error
        return found

    def _batches(self, plans: Sequence[RowPlan]) -> list[PackedBatch]:
        if not plans:
            raise LearnerError("batches: no rows; nothing was trained")
        by_update: dict[int, list[RowPlan]] = {}
        for plan in plans:
            by_update.setdefault(plan.update, []).append(plan)
        updates = sorted(by_update)
        if updates != list(range(len(updates))):
            raise LearnerError(f"batches: updates {updates} are not numbered from 0 without gaps")
        return [PackedBatch(own, _denominators(own), self.load) for _, own in sorted(by_update.items())]

    def _row(self, table: pa.Table, place: int) -> Row:
        record = table.select(["row", "sample_ids", "cu_seqlens"]).slice(place, 1).to_pylist()[0]
        arrays = {name: table[name][place].values.to_numpy() for name in ("token_ids", *STREAMS)}
        row = _row_of(record, arrays, self._images_of(record["row"]))
        return replace(row, experts=self._experts_of(row)) if row.row in self._experts else row

    def _experts_of(self, row: Row) -> Array:
        group, place = self._experts[row.row]
        (stored,) = self._groups.read(group).slice(place, 1).to_pylist()
        numbers = np.frombuffer(stored["experts"], f"<u{stored['width']}")
        shape = row.num_tokens, stored["num_layers"], stored["top_k"]
        if len(numbers) != np.prod(shape):
            raise LearnerError(f"batches row {row.row}: {len(numbers)} experts, which are not of shape {shape}")
        return numbers.reshape(shape)

    def _images_of(self, row: int) -> RowImages | None:
        if not (images := self._images.get(row)):
            return None
        # Taken out and put back at the end: a dict keeps that order, so the first is the oldest.
        found = {image.digest: self._tensors.pop(image.digest, None) for image in images}
        tensors = {digest: own or self._load_tensors(digest) for digest, own in found.items()}
        self._tensors |= tensors
        while len(self._tensors) > len(tensors) and _size(self._tensors) > MOST_TENSORS:
            del self._tensors[next(iter(self._tensors))]
        return row_images(f"batches row {row}", [vars(image) for image in images], tensors)

    def _load_tensors(self, digest: str) -> list[Tensor]:
        if digest not in self._stored:
            return []
        group, number = self._stored[digest]
        (stored,) = self._groups.read(group).select(TENSORS).slice(number, 1).to_pylist()
        parts = zip(*(stored[name] for name in TENSORS), strict=True)
        return [Tensor(name, dtype, tuple(shape), data) for name, dtype, shape, data in parts]


@dataclass(frozen=True)
class ImagePlan:
    """What every rank knows of an image of a packed row."""

    row: int
    place: int
    offset: int
    num_tokens: int
    digest: str
    has_tensors: bool
    group: "Group"
    """Where its row of `batch_images` is stored."""
    number: int
    """Its place in that group."""


def _expert_places(group: "Group", table: pa.Table) -> list[Any]:
    return [(row, (group, place)) for place, row in enumerate(table["row"].to_pylist())]


def _image_plans(group: "Group", table: pa.Table) -> list[ImagePlan]:
    rows = table.select(["row", "place", "offset", "num_tokens", "digest"]).to_pylist()
    has_tensors = [bool(names) for names in table["names"].to_pylist()]
    return [
        ImagePlan(**row, has_tensors=has, group=group, number=number)
        for number, (row, has) in enumerate(zip(rows, has_tensors, strict=True))
    ]


def _or_raise(found: list[Any] | Exception) -> list[Any]:
    if isinstance(found, Exception):
        raise found
    return found


def _size(tensors: dict[str, list[Tensor]]) -> int:
    return sum(len(each.data) for own in tensors.values() for each in own)


def _plan_of(row: Row, table: pa.Table, group: "Group", place: int) -> RowPlan:
    weighted = {name: int(np.count_nonzero(row.streams[f"{name}_weights"])) for name in COMPONENTS}
    stated = {name: table[f"{name}_tokens"][place].as_py() for name in COMPONENTS}
    of_row = row.row, table["update"][place].as_py(), row.sample_ids, row.borders, row.once
    return RowPlan(*of_row, row.num_weighted, weighted, stated, group, place)


def _row_of(record: dict[str, Any], arrays: dict[str, Array], images: RowImages | None) -> Row:
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
        images,
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


def _denominators(plans: Sequence[RowPlan]) -> dict[str, int]:
    counted = {name: sum(plan.weighted[name] for plan in plans) for name in COMPONENTS}
    for name, count in counted.items():
        # Stated in every row by the stage that packs, and counted again: a wrong one scales the gradient unseen.
        stated = sorted({plan.stated[name] for plan in plans})
        if stated != [count]:
            raise LearnerError(f"batches: {name}_tokens says {stated}, but {count} tokens have {name} weight")
    if not any(counted.values()):
        raise LearnerError("batches: no token has weight in any component; nothing was trained")
    return counted

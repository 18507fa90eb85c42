"""Images among tokens: which part of a message brought each in, which tokens stand for it, and what a model is given.

A message refers to its images by digest, in the order of its parts. Tokens that stand for images are known by the
renderer's map from token ids to types, which each trace records, and never by their id alone: a policy can sample one.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.schemas.stage_tables import BATCH_IMAGES
from tasks.arrays.columns import rows_with, texts
from tasks.arrays.ragged import Integers, Ragged
from tasks.runtime.stored_rows import StoredRows

REFERENCE = "stagecoach-image:"
"""What a reference to an image begins with, where the image was in a message or a trace's record."""
BY_DIGEST = f"{REFERENCE}sha256:"
TYPES = "mm_token_type_id_map"
"""The field of a trace's record that says of which type a token is: 1 stands for images, 2 for videos."""
IMAGE_TYPE = 1
TENSORS = ("names", "dtypes", "shapes", "data")
"""The columns of `batch_images` that hold an image's tensors."""


class ImageBreach(ValueError):
    """The tokens that stand for images do not fit the images of their messages."""


class PlacedImage(NamedTuple):
    """An image among the tokens of a row or of a sample."""

    key: tuple[str, str]
    """Its group and digest."""
    offset: int
    """The first token that stands for it."""
    num_tokens: int


@dataclass(frozen=True)
class Tensor:
    """One tensor of an image, as it is stored: model-agnostic, with the name that the processor gave it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def array(self) -> npt.NDArray[Any]:
        """Return it as numpy has it."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


def digests_of(body: str) -> list[str]:
    """Return the digests of the images that the parts of a message brought in, in the order of its parts."""
    if BY_DIGEST not in body:  # nearly all messages
        return []
    content = json.loads(body).get("content")
    return [digest for part in content if (digest := _digest_of(part))] if isinstance(content, list) else []


def _digest_of(part: Any) -> str:
    """Return the digest of the image that a part of a message is; empty where it is none."""
    if not isinstance(part, Mapping):
        return ""
    value = next((part[name] for name in ("image_url", "image", "input_image") if part.get(name)), None)
    address = value.get("url") if isinstance(value, Mapping) else value
    return address.removeprefix(BY_DIGEST) if isinstance(address, str) and address.startswith(BY_DIGEST) else ""


def token_types(record: str) -> dict[int, int]:
    """Return the type of each token id that stands for something else than text, from a trace's record."""
    return {int(token): int(kind) for token, kind in json.loads(record).get(TYPES, {}).items()}


def show_images(messages: pa.Table) -> bool:
    """Tell whether any of some messages may refer to an image; their bodies, which are long, are not parsed."""
    return bool(pc.any(pc.match_substring(messages["body"], BY_DIGEST)).as_py())


def can_see(traces: pa.Table) -> bool:
    """Tell whether tokens can stand for images in any of some traces; their records, which are long, are not parsed."""
    return bool(pc.any(pc.match_substring(traces["record"], f'"{TYPES}":{{"')).as_py())


def placeholders(tokens: Ragged, owner: Integers, traces: pa.Table) -> npt.NDArray[np.bool_]:
    """Return, per token of some messages, flat, whether its id stands for something else than text in its trace.

    `owner` is the trace row of each message. One that was sampled is among them.
    """
    found = np.zeros(len(tokens.values), np.bool_)
    if not can_see(traces):
        return found
    types = [tuple(sorted(token_types(record))) for record in texts(traces["record"])]
    for special in dict.fromkeys(types):  # one, where one model sampled all of them
        own = np.array([each == special for each in types])[owner]
        found |= own[tokens.row_of_value] & np.isin(tokens.values, special)
    return found


class SampleImages:
    """Finds the images of samples among their tokens; each message is looked at once, however many branches have it."""

    def __init__(self, messages: pa.Table, traces: pa.Table, num_tokens: Mapping[tuple[str, str], int]) -> None:
        """`num_tokens` says, by group and digest, how many tokens stand for an image that has tensors."""
        self._names = texts(messages["trace_id"])
        self._numbers = messages["message"].to_pylist()
        self._bodies = texts(messages["body"])
        self._tokens, self._mask = Ragged.of(messages["token_ids"]), Ragged.of(messages["mask"])
        records, groups = texts(traces["record"]), texts(traces["group_id"])
        trace_row = {name: row for row, name in enumerate(texts(traces["trace_id"]))}
        self._types = [token_types(record) for record in records]
        self._groups, self._trace_row = groups, trace_row
        self._num_tokens = num_tokens
        self._found: dict[int, list[PlacedImage]] = {}

    def along(self, path: Sequence[int]) -> Iterator[PlacedImage]:
        """Yield the images along a path of rows of messages, by their places among the path's tokens.

        Raises ImageBreach where the tokens that stand for images are not those of the images of their message.
        """
        begin = 0
        for row in path:
            for image in self._of(row):
                yield image._replace(offset=begin + image.offset)
            begin += int(self._tokens.lengths[row])

    def _of(self, row: int) -> list[PlacedImage]:
        if row not in self._found:
            self._found[row] = list(self._place(row))
        return self._found[row]

    def _place(self, row: int) -> Iterator[PlacedImage]:
        trace = self._trace_row[self._names[row]]
        places = self._placeholders(row, self._types[trace])
        begin = 0
        for digest in digests_of(self._bodies[row]):
            key = self._groups[trace], digest
            if key not in self._num_tokens:
                raise self._breach(row, f"its image {digest[:12]} has no tensors in table image_tensors")
            size = self._num_tokens[key]
            own = places[begin : begin + size]
            # Those of one image lie side by side: else they are another image's, or not all are there.
            if len(own) != size or int(own[-1]) - int(own[0]) + 1 != size:
                raise self._breach(row, f"{len(places)} tokens stand for its images, which want {size} at {begin}")
            yield PlacedImage(key, int(own[0]), size)
            begin += size
        if begin != len(places):
            raise self._breach(row, f"{len(places)} tokens stand for images, and those that it brought in have {begin}")

    def _placeholders(self, row: int, types: Mapping[int, int]) -> Integers:
        """Return the places of the tokens of a message that stand for images; one that was sampled stands for none."""
        part = slice(*self._tokens.offsets[row : row + 2])
        given = ~self._mask.values[part].astype(np.bool_)
        special = np.isin(self._tokens.values[part], [*types]) & given
        found: Integers = np.flatnonzero(special)
        if any(types[int(token)] != IMAGE_TYPE for token in self._tokens.values[part][found]):
            raise self._breach(row, "a token stands for a video, which no model is trained on here")
        return found

    def _breach(self, row: int, what: str) -> ImageBreach:
        return ImageBreach(
            f"table messages, message {self._numbers[row]} of trace {self._names[row]}: {what}. Nothing was trained; "
            "traces and messages are safe. Quarantine the trace, or sample again with the model's own processor"
        )


class StoredTensors:
    """The table `image_tensors`, of which the tensors are read when they are wanted."""

    def __init__(self, rows: StoredRows) -> None:
        self._rows = rows
        self._parts: dict[str, set[int]] = {}
        """The parts of the table that have tensors of an image, by its digest."""
        self.num_tokens: dict[tuple[str, str], int] = {}
        """Tokens that stand for an image, by its group and digest."""
        for number, part in enumerate(rows.parts(["group_id", "digest", "num_tokens"])):
            for row in part.to_pylist():
                self._parts.setdefault(row["digest"], set()).add(number)
                self.num_tokens[row["group_id"], row["digest"]] = row["num_tokens"]

    def of(self, digests: Sequence[str]) -> dict[tuple[str, str], list[dict[str, Any]]]:
        """Return the rows of some images, by group and digest, in the order of the table."""
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for number in sorted({number for digest in digests for number in self._parts[digest]}):
            part = self._rows.read(number, None)
            for row in rows_with(part, "digest", digests).to_pylist():
                found.setdefault((row["group_id"], row["digest"]), []).append(row)
        return found


def batch_images(
    rows: Sequence[Sequence[PlacedImage]], first_row: int, tensors: StoredTensors, known: set[str]
) -> pa.Table:
    """Return the rows of `batch_images` for packed rows with these images, numbered from `first_row`.

    An image's tensors stand where the batch has it first; `known` are the digests that it has had, and grows.
    """
    new = {digest for row in rows for image in row if (digest := image.key[1]) not in known}
    stored = tensors.of(sorted(new))
    records = []
    for number, row in enumerate(rows):
        for place, image in enumerate(row):
            digest = image.key[1]
            parts = [] if digest in known else stored[image.key]
            known.add(digest)
            own = {name: [part[column] for part in parts] for name, column in zip(TENSORS, _COLUMNS, strict=True)}
            where = {"row": first_row + number, "place": place, "offset": image.offset, "num_tokens": image.num_tokens}
            records.append({**where, "digest": digest, **own})
    return pa.Table.from_pylist(records, schema=BATCH_IMAGES.arrow)


_COLUMNS = ("name", "dtype", "shape", "data")

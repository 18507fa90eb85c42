"""Stores images once: their bytes in the table `images`, a reference where a message or a trace's record had them.

An image is a data URL in base64 that is a JSON value by itself, as in the part of a message that introduced it; the
reference replaces that value. Images at other URLs stay URLs. Plain text from a tool stays text, also where it spells a
data URL: the model read it token by token.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.schemas.stage_tables import IMAGES
from tasks.arrays.columns import texts, with_column
from tasks.arrays.images import BY_DIGEST, REFERENCE

LITERAL = REFERENCE + "text:"
"""Escapes a text that itself begins like a reference, so that it can be restored."""
UNREFERENCED = f"data:image/|{REFERENCE}"
"""Matches the texts that may have to change before images are stored."""
TRACE_COLUMNS = ("record", "info")
"""The columns of traces that are JSON and may hold images; in messages it is `body`."""
TEXT_KEYS = ("content", "text")
"""Keys whose value the model reads as text."""

Change = Callable[[str, int | None, str], str]
"""Rewrites a text, given the trace's id, the message's number (None in the trace's record) and the text."""


class MissingImage(ValueError):
    """A row refers to an image that is not among those it was read with."""


class Image(NamedTuple):
    """An image as a data URL spells it; `media_type` is everything before the base64."""

    media_type: str
    data: bytes

    @property
    def digest(self) -> str:
        """The SHA-256 over media type and bytes, in hex: two spellings of one picture are two images."""
        return hashlib.sha256(self.media_type.encode() + b"\0" + self.data).hexdigest()

    @property
    def reference(self) -> str:
        """What stands where the image was."""
        return f"{BY_DIGEST}{self.digest}"

    @property
    def url(self) -> str:
        """The data URL, exactly as it was."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


def parse_image(text: str) -> Image | None:
    """Return the image of a data URL; None for other texts, and where the URL could not be restored exactly."""
    head, comma, body = text.partition(";base64,")
    if not comma or not head.startswith("data:image/"):
        return None
    try:
        image = Image(head.removeprefix("data:"), base64.b64decode(body, validate=True))
    except (binascii.Error, ValueError):
        return None  # no valid base64: the text stays as it is
    return image if image.url == text else None


def extract_images(traces: pa.Table, messages: pa.Table) -> dict[str, pa.Table]:
    """Return traces and messages with references in place of images, and `images` where there are any.

    An image has one row for each group that uses it, with its first use: the message, or none for the record.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    groups = dict(zip(texts(traces["trace_id"]), texts(traces["group_id"]), strict=True))

    def change(trace_id: str, message: int | None, text: str) -> str:
        image = parse_image(text)
        if image is None:
            return _escape(text)
        row = {"group_id": groups[trace_id], "digest": image.digest, **image._asdict()}
        rows.setdefault((row["group_id"], row["digest"]), row | {"trace_id": trace_id, "message": message})
        return image.reference

    tables = _rewrite_tables(traces, messages, UNREFERENCED, change)
    if rows:
        tables["images"] = pa.Table.from_pylist(list(rows.values()), schema=IMAGES.arrow)
    return tables


def extract_known_images(traces: pa.Table, images: pa.Table | None) -> pa.Table:
    """Return restored traces, whose info may have changed since, with references to those images that are in `images`.

    Other images stay in the text: no table would hold their bytes.
    """
    known = set() if images is None else set(texts(images["digest"]))

    def change(trace_id: str, message: int | None, text: str) -> str:
        image = parse_image(text)
        return _escape(text) if image is None or image.digest not in known else image.reference

    return _rewrite_traces(traces, UNREFERENCED, change)


def restore_images(traces: pa.Table, messages: pa.Table, images: pa.Table | None) -> dict[str, pa.Table]:
    """Return traces and messages as before `extract_images`. Raises MissingImage where an image is not there."""
    rows = [] if images is None else images.to_pylist()
    urls = {f"{BY_DIGEST}{row['digest']}": Image(row["media_type"], row["data"]).url for row in rows}

    def change(trace_id: str, message: int | None, text: str) -> str:
        if text.startswith(LITERAL):
            return text.removeprefix(LITERAL)
        if text.startswith(REFERENCE) and text not in urls:
            place = "its record" if message is None else f"message {message}"
            raise MissingImage(
                f"trace {trace_id}, {place}: {text} is not in table images. The trace's tokens and rewards are whole. "
                "Read the images of the same work with it; if they are lost, sample the step again."
            )
        return urls.get(text, text)

    return _rewrite_tables(traces, messages, REFERENCE, change)


def _escape(text: str) -> str:
    return LITERAL + text if text.startswith(REFERENCE) else text


def _rewrite_tables(traces: pa.Table, messages: pa.Table, pattern: str, change: Change) -> dict[str, pa.Table]:
    # Messages first: the first use of an image is the message that introduced it, where one did.
    numbers = messages["message"].to_pylist()
    messages = _rewrite_column(messages, "body", numbers, pattern, change)
    return {"traces": _rewrite_traces(traces, pattern, change), "messages": messages}


def _rewrite_traces(traces: pa.Table, pattern: str, change: Change) -> pa.Table:
    for column in TRACE_COLUMNS:
        traces = _rewrite_column(traces, column, [None] * traces.num_rows, pattern, change)
    return traces


def _rewrite_column(table: pa.Table, column: str, numbers: list[int | None], pattern: str, change: Change) -> pa.Table:
    """Rewrite the texts in a column of JSON; rows without the pattern, which are nearly all, are not parsed."""
    hits = np.flatnonzero(pc.match_substring_regex(table[column], pattern).to_numpy())
    if not len(hits):
        return table
    values, names = texts(table[column]), texts(table["trace_id"])
    for row in map(int, hits):
        rewritten = _rewrite_json(json.loads(values[row]), partial(change, names[row], numbers[row]))
        values[row] = json.dumps(rewritten, ensure_ascii=False, separators=(",", ":"))
    return with_column(table, column, pa.array(values, pa.string()))


def _rewrite_json(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with its texts rewritten, except those that the model reads as text (TEXT_KEYS)."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_rewrite_json(each, change) for each in value]
    if isinstance(value, dict):
        # A text under these keys was read token by token: a reference in its place would not be what the model saw.
        plain = {name: value[name] for name in TEXT_KEYS if isinstance(value.get(name), str)}
        return {name: plain[name] if name in plain else _rewrite_json(each, change) for name, each in value.items()}
    return value

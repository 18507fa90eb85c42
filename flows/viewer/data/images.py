"""Images of a trace: found by their digests, and only shown where their bytes are what they say they are."""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import polars as pl

from flows.queries.store_reader import Library
from flows.viewer.data.messages import message_works
from flows.viewer.data.trace import Found
from tasks.inference.trace_rows.images import REFERENCE

MAGIC = {
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/webp": (b"RIFF",),
}
"""How the files of each kind that is shown begin. SVG is none of them: it can carry programs."""
LARGEST = 4 * 2**20
"""Bytes of an image that is shown."""
MOST = 16 * 2**20
"""Bytes of all images of one page together."""


class Images:
    """The images that the messages of a page refer to, read together: `images.of(part)`."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._rows = {f"{REFERENCE}sha256:{row['digest']}": row for row in rows}
        self._left = MOST

    def of(self, part: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what a part of a message shows: `digest`, `media_type`, `size`, `url` and `why` there is none.

        None for a part that is no image.
        """
        inner = next((part[name] for name in ("image_url", "image", "input_image") if part.get(name)), None)
        url = inner.get("url") if isinstance(inner, Mapping) else inner
        if not isinstance(url, str):
            return None
        row = self._rows.get(url)
        if row is None:
            gone = url.startswith(REFERENCE)
            said = "its bytes are not in the store" if gone else "images of other addresses are not loaded"
            return {"digest": None, "media_type": None, "size": None, "url": None, "address": url[:200], "why": said}
        return self._shown(row)

    def _shown(self, row: Mapping[str, Any]) -> dict[str, Any]:
        kind, data = row["media_type"].partition(";")[0].strip().lower(), row["data"]
        told = {
            "digest": row["digest"],
            "media_type": row["media_type"],
            "size": len(data),
            "url": None,
            "address": None,
        }
        why = refusal(kind, data)
        if why is None and len(data) > self._left:
            why = "the page shows enough images already"
        if why is not None:
            return told | {"why": why}
        self._left -= len(data)
        return told | {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}", "why": None}


def refusal(media_type: str, data: bytes) -> str | None:
    """Return why an image is not shown; None where its kind is one that is and its bytes begin like it."""
    if media_type not in MAGIC:
        return "images of this type are not shown"
    if not data.startswith(MAGIC[media_type]) or (media_type == "image/webp" and data[8:12] != b"WEBP"):
        return "its bytes are no image of this type"
    return f"it has more than {LARGEST // 2**20} MiB" if len(data) > LARGEST else None


def images(library: Library, found: Found, bodies: Iterable[str]) -> Images:
    """Return the images that some messages of a trace refer to; nothing is read where they refer to none."""
    mark = f"{REFERENCE}sha256:"
    digests = {body[at + len(mark) :][:64] for body in bodies for at in _places(body, mark)}
    if not digests:
        return Images(())
    rows = library.frames().rows(message_works(library, found, "images"), "images")
    rows = rows.filter((pl.col("group_id") == found.row["group_id"]) & pl.col("digest").is_in(sorted(digests)))
    read = rows.select("digest", "media_type", "data").collect().to_dicts()
    return Images(row for row in read if row["digest"] == _digest(row))


def _places(text: str, mark: str) -> Iterable[int]:
    at = text.find(mark)
    while at >= 0:
        yield at
        at = text.find(mark, at + 1)


def _digest(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(row["media_type"].encode() + b"\0" + row["data"]).hexdigest()

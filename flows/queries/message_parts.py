"""Messages in parts as a person reads them: thoughts, texts, tool calls with their results, images by digest."""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from flows.queries.messages import message_works
from flows.queries.store_reader import StoreReader
from flows.queries.trace import FoundTrace
from flows.reporting.formats import cut
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


def images(library: StoreReader, found: FoundTrace, bodies: Iterable[str]) -> Images:
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


LONGEST = 20_000
"""Characters of one text that a page shows; all of them are in its JSON."""
KNOWN = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "provider_state")
"""What of a body is told by itself; the state that a provider keeps for itself only where there is one."""
Values = dict[str, Any]


def long_text(text: str) -> Values:
    """Return a text with what of it a page shows: `text`, `head` (None: all of it) and how much was `left_out`."""
    head, left_out = cut(text, LONGEST)
    return {"text": text, "head": head if left_out else None, "left_out": left_out}


def read_message(row: Mapping[str, Any], images: Images) -> Values:
    """Return a message's role, name, thoughts, parts, tool calls and the call that it answers.

    `row` is one of `data.messages.messages`. Parts are of kind text, image or other; see `part`.
    """
    body = _body(row["body"])
    content = body.get("content", row["content"])
    if content is None and not body.get("tool_calls"):
        content = row["content"]
    rest = {name: value for name, value in body.items() if name not in KNOWN}
    rest |= {"provider_state": body["provider_state"]} if body.get("provider_state") else {}
    thoughts = body.get("reasoning_content")
    return {
        **{name: row[name] for name in ("message", "parent", "role", "sampled", "num_tokens", "num_sampled")},
        "name": body.get("name") if isinstance(body.get("name"), str) else None,
        "thoughts": long_text(_as_text(thoughts)) if thoughts else None,
        "parts": [each for piece in _pieces(content) if (each := part(piece, images))],
        "calls": [_call(each) for each in _list(body.get("tool_calls"))],
        "answers": body.get("tool_call_id") if isinstance(body.get("tool_call_id"), str) else None,
        "rest": long_text(_as_text(rest)) if rest else None,
    }


def part(piece: Any, images: Images) -> Values | None:
    """Return one part of a message's content: its `kind`, and `text` or `image`; None for an empty text."""
    if isinstance(piece, str):
        return {"kind": "text", "text": long_text(piece)} if piece else None
    if isinstance(piece, Mapping):
        if piece.get("type") == "text" and isinstance(piece.get("text"), str):
            return part(piece["text"], images)
        if (shown := images.of(piece)) is not None:
            return {"kind": "image", "image": shown}
    return {"kind": "other", "text": long_text(_as_text(piece))}


def linked(found: Sequence[Values]) -> None:
    """Tell each call which message answers it, and each answer which message called; by the nearest one above.

    `found` are messages along one way or several; ids of calls may come again. Adds `result` to calls and `asked`
    (message and name) to messages.
    """
    above = {each["message"]: each for each in found}
    for each in found:
        each["asked"] = None
        at = above.get(each["parent"]) if each["answers"] is not None else None
        while at is not None and each["asked"] is None:
            for call in at["calls"]:
                if call["id"] == each["answers"]:
                    call["result"] = each["message"]
                    each["asked"] = {"message": at["message"], "name": call["name"]}
            # Several results of one turn follow each other: only those stand between.
            at = above.get(at["parent"]) if at["answers"] is not None else None


def _call(call: Any) -> Values:
    given = call if isinstance(call, Mapping) else {"arguments": call}
    inner = given.get("function")
    inner = inner if isinstance(inner, Mapping) else given
    name, arguments = inner.get("name"), inner.get("arguments")
    return {
        "id": given.get("id") if isinstance(given.get("id"), str) else None,
        "name": name if isinstance(name, str) else None,
        "arguments": long_text(_arguments(arguments)),
        "result": None,
    }


def _arguments(arguments: Any) -> str:
    """Return the arguments of a call laid out over lines where they are JSON; else as the model wrote them."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return str(arguments)
    return _as_text(arguments)


def _body(text: str) -> Values:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _pieces(content: Any) -> Iterator[Any]:
    if isinstance(content, list):
        yield from content
    elif content is not None:
        yield content


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)

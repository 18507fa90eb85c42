"""Messages of a trace: the nodes of its graph in order, the part that a page shows, and each one in parts.

Parts are as a person reads them: thoughts, texts, tool calls with their results, images by digest.
"""

import base64
import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from flows.queries.request import parse_object
from flows.queries.store_reader import StoreReader
from flows.queries.trace import FoundTrace
from flows.queries.views import select
from flows.reporting.formats import cut
from storage.read.lineage import Work
from tasks.arrays.images import REFERENCE
from tasks.arrays.message_graph import find_branches

Path = list[int]


_MESSAGES = """
select message, parent, role, content, body, sampled, len(token_ids) as num_tokens,
    list_sum(list_transform(mask, lambda is_sampled: is_sampled::int))::bigint as num_sampled, texts
from messages
left join (select message, texts from message_texts where trace_id = $id) as said using (message)
where trace_id = $id
order by message
"""


def messages(reader: StoreReader, trace: FoundTrace) -> pl.DataFrame:
    """Return the messages of a trace in order: message, parent, role, content, body, sampled and counts of its tokens.

    `num_tokens` are those that the message adds, `num_sampled` the ones of them that the policy sampled; `texts` is as
    view `message_texts` has it.
    """
    of_trace = {"messages": pl.col("trace_id") == trace.trace_id}
    return select(reader.frames(), [trace.lineage], _MESSAGES, of_trace, id=trace.trace_id)


def message_works(reader: StoreReader, trace: FoundTrace, table: str = "messages") -> Sequence[Work]:
    """Return the work that made the trace's messages, or its images: not its scoring again, which takes them."""
    return reader.graph.origins(trace.lineage.traces, table)


def branches(rows: pl.DataFrame) -> list[Path]:
    """Return the ways from a root to each leaf, by the leaves' numbers; each a list of messages.

    `rows` are of one trace and have the columns message and parent. Raises BrokenGraph (tasks.arrays.message_graph).
    """
    graph = rows.select(pl.lit("").alias("trace_id"), "message", "parent").to_arrow()
    found = find_branches(graph, np.zeros(len(rows), np.int64)).path
    numbers = rows["message"].to_numpy()
    return [numbers[way].tolist() for way in np.split(found.values, found.offsets[1:-1])] if len(rows) else []


WINDOW = 100
"""Messages that a page shows."""

MAGIC = {
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/webp": (b"RIFF",),
}
"""How the files of each kind that is shown begin. SVG is none of them: it can carry programs."""
LARGEST = 4 * 2**20
"""Bytes of an image that is shown."""
LARGEST_PIXELS = 16_000_000
"""Pixels of an image that is shown."""
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
        values: dict[str, Any] = dict.fromkeys(("digest", "media_type", "size", "url", "address"))
        if row is None:
            gone = url.startswith(REFERENCE)
            why = "its bytes are not in the store" if gone else "images of other addresses are not loaded"
            return {**values, "address": url[:200], "why": why}
        kind, data = row["media_type"].partition(";")[0].strip().lower(), row["data"]
        values |= {"digest": row["digest"], "media_type": row["media_type"], "size": len(data)}
        refused = refusal(kind, data)
        if refused is None and len(data) > self._left:
            refused = "the page shows enough images already"
        if refused is None:
            # Images stand in the page itself, as data: bytes are what has to be bounded.
            self._left -= len(data)
            values["url"] = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        return {**values, "why": refused}


def refusal(media_type: str, data: bytes) -> str | None:
    """Return why an image is not shown; None where its kind is one that is and its bytes begin like it."""
    if media_type not in MAGIC:
        return "images of this type are not shown"
    # A browser goes by the bytes, not by the type that is said; RIFF is the beginning of sound files too.
    if not data.startswith(MAGIC[media_type]) or (media_type == "image/webp" and data[8:12] != b"WEBP"):
        return "its bytes are no image of this type"
    if len(data) > LARGEST:
        return f"it has more than {LARGEST // 2**20} MiB"
    # Few bytes can hold many pixels, all of which a browser would lay out in memory.
    return f"it has more than {LARGEST_PIXELS // 10**6} megapixels" if _pixels(data) > LARGEST_PIXELS else None


def _pixels(data: bytes) -> int:
    """Return how many pixels an image has, by its header; 0 where it has none, and a browser shows nothing."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as picture:
            return picture.width * picture.height
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return LARGEST_PIXELS + 1 if isinstance(error, Image.DecompressionBombError) else 0


def images(reader: StoreReader, trace: FoundTrace, bodies: Iterable[str]) -> Images:
    """Return the images that some messages of a trace refer to; nothing is read where they refer to none."""
    digests = {
        digest for body in bodies for digest in re.findall(f"{re.escape(REFERENCE)}sha256:([0-9a-f]{{64}})", body)
    }
    if not digests:
        return Images(())
    rows = reader.frames().rows(message_works(reader, trace, "images"), "images")
    rows = rows.filter(pl.col("digest").is_in(sorted(digests)), group_id=trace.row["group_id"])
    read = rows.select("digest", "media_type", "data").collect().to_dicts()
    # Bytes that do not have the digest they are stored under are not the image that the policy saw.
    return Images(row for row in read if row["digest"] == _digest(row))


def _digest(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(row["media_type"].encode() + b"\0" + row["data"]).hexdigest()


LONGEST = 20_000
"""Characters of one text that a page shows; all of them are in its JSON."""
KNOWN = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "provider_state")
"""Fields of a body that are not listed with the rest; `provider_state` is, where it is not empty."""
Values = dict[str, Any]


def long_text(text: str) -> Values:
    """Return a text with what of it a page shows: `text`, `head` (None: all of it) and how much was `left_out`."""
    head, left_out = cut(text, LONGEST)
    return {"text": text, "head": head if left_out else None, "left_out": left_out}


def read_message(row: Mapping[str, Any], images: Images) -> Values:
    """Return a message's role, name, thoughts, parts and tool calls, and the id of the call that it answers.

    `row` is one of `messages`. Parts are of kind text, image or other; see `part`.
    """
    body = parse_object(row["body"])
    content = body.get("content", row["content"])
    # A body that holds calls alone has no content. Any other without content has it in the message's own column.
    if content is None and not body.get("tool_calls"):
        content = row["content"]
    rest = {name: value for name, value in body.items() if name not in KNOWN}
    rest |= {"provider_state": body["provider_state"]} if body.get("provider_state") else {}
    pieces = content if isinstance(content, list) else [] if content is None else [content]
    thoughts, calls = body.get("reasoning_content"), body.get("tool_calls")
    return {
        **{name: row[name] for name in ("message", "parent", "role", "sampled", "num_tokens", "num_sampled")},
        "name": body.get("name") if isinstance(body.get("name"), str) else None,
        "thoughts": long_text(_as_text(thoughts)) if thoughts else None,
        "parts": [shown for piece in pieces if (shown := part(piece, images))],
        "calls": [_call(call) for call in calls] if isinstance(calls, list) else [],
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


def _call(call: Any) -> Values:
    given = call if isinstance(call, Mapping) else {"arguments": call}
    inner = given.get("function")
    inner = inner if isinstance(inner, Mapping) else given
    name, arguments = inner.get("name"), inner.get("arguments")
    return {
        "id": given.get("id") if isinstance(given.get("id"), str) else None,
        "name": name if isinstance(name, str) else None,
        "arguments": long_text(_arguments(arguments)),
    }


def _arguments(arguments: Any) -> str:
    """Return the arguments of a call laid out over lines where they are JSON; else as the model wrote them."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return str(arguments)
    return _as_text(arguments)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)

"""Images by reference: bytes once for each group, the very URL back, and nothing else touched."""

import base64
import hashlib
import json

import pytest

from storage.schemas.contract import RowPlace, check_rows
from storage.schemas.stage_tables import IMAGES
from tasks.inference.trace_rows.images import LITERAL, MissingImage, extract_images, parse_image, restore_images
from tests.fixtures.builders import message, table, trace

DATA = b"\x89PNG not really\xff"
URL = f"data:image/png;base64,{base64.b64encode(DATA).decode()}"
DIGEST = hashlib.sha256(b"image/png\0" + DATA).hexdigest()
REFERENCE = f"stagecoach-image:sha256:{DIGEST}"


def part(url):
    """An image as a part of a message."""
    return {"type": "image_url", "image_url": {"url": url}}


def body(*parts):
    """A user's message with these parts, or with a text."""
    content = parts[0] if parts and isinstance(parts[0], str) else list(parts)
    return json.dumps({"role": "user", "content": content}, ensure_ascii=False, separators=(",", ":"))


def rows(bodies, groups, **columns):
    """Traces with these groups, and their messages with these bodies."""
    traces = [trace(name, group_id=groups[name], **columns) for name in bodies]
    messages = [
        message(name, number, parent=number - 1 if number else None, body=text)
        for name, texts in bodies.items()
        for number, text in enumerate(texts)
    ]
    return table("traces", traces), table("messages", messages)


def test_bytes_are_there_once_for_each_group_with_their_first_use():
    asked = body({"type": "text", "text": "what is this?"}, part(URL))
    bodies = {"a": [body("hello"), asked, asked], "b": [asked], "c": [asked]}
    traces, messages = rows(bodies, {"a": "g", "b": "g", "c": "h"})
    made = extract_images(traces, messages)
    check_rows(made["images"], IMAGES, RowPlace("images"))
    image = {"digest": DIGEST, "media_type": "image/png", "data": DATA}
    assert made["images"].to_pylist() == [
        {"group_id": "g", **image, "trace_id": "a", "message": 1},
        {"group_id": "h", **image, "trace_id": "c", "message": 0},
    ]
    referred = body({"type": "text", "text": "what is this?"}, part(REFERENCE))
    assert made["messages"]["body"].to_pylist() == [body("hello"), *[referred] * 4]
    assert made["messages"].drop(["body"]).equals(messages.drop(["body"])) and made["traces"].equals(traces)
    assert restore_images(made["traces"], made["messages"], made["images"]) == {"traces": traces, "messages": messages}


def test_a_task_s_own_image_is_in_the_record():
    record = json.dumps({"task": {"data": {"picture": URL}}}, separators=(",", ":"))
    traces, messages = rows({"a": [body("hello")]}, {"a": "g"}, record=record)
    made = extract_images(traces, messages)
    assert made["images"].to_pylist()[0]["message"] is None
    assert made["traces"]["record"].to_pylist() == [record.replace(URL, REFERENCE)]
    assert restore_images(made["traces"], made["messages"], made["images"])["traces"].equals(traces)


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example/b.png",
        "data:image/png;base64,not base64!",
        "data:image/png;base64,QR==",  # other bits than its bytes have: it could not be spelt again
        "data:text/plain;base64,aGk=",
        "data:image/svg+xml,<svg/>",
    ],
)
def test_what_is_no_image_here_stays_as_it_is(url):
    assert parse_image(url) is None
    traces, messages = rows({"a": [body(part(url))]}, {"a": "g"})
    assert extract_images(traces, messages) == {"traces": traces, "messages": messages}


def test_text_that_spells_an_image_is_text():
    traces, messages = rows({"a": [body(URL), body({"type": "text", "text": URL})]}, {"a": "g"})
    assert extract_images(traces, messages) == {"traces": traces, "messages": messages}


def test_an_address_that_looks_like_a_reference_comes_back_as_it_was():
    traces, messages = rows({"a": [body(part(REFERENCE)), body(part(LITERAL + "x"))]}, {"a": "g"})
    made = extract_images(traces, messages)
    assert set(made) == {"traces", "messages"} and not made["messages"].equals(messages)
    assert restore_images(made["traces"], made["messages"], None)["messages"].equals(messages)


def test_a_lost_image_is_named():
    traces, messages = rows({"a": [body(part(URL))]}, {"a": "g"})
    made = extract_images(traces, messages)
    with pytest.raises(MissingImage, match=f"trace a, message 0: {REFERENCE} is not in table images"):
        restore_images(made["traces"], made["messages"], None)

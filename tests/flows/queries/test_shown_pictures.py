"""Which pictures a page shows: bounds of bytes and of pixels, by the file's header, before a browser has it."""

import io
import struct
import zlib

import pytest

from flows.queries.messages import LARGEST, MOST, Images, refusal

REFERENCE = "stagecoach-image:sha256:"


def png(width: int, height: int) -> bytes:
    """A PNG file of so many black pixels, which are few bytes."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


def header(width: int, height: int) -> bytes:
    """The beginning of a PNG file that says to be so large, and breaks off where its pixels would begin."""
    told = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + told
        + struct.pack(">I", zlib.crc32(told))
        + struct.pack(">I", 9)
        + b"IDAT"
    )


@pytest.mark.parametrize("data", [png(5000, 4000), header(5000, 4000), header(2**31 - 1, 2**31 - 1)], ids=len)
def test_a_picture_of_too_many_pixels_is_not_shown(data):
    assert len(data) < 10_000 and refusal("image/png", data) == "it has more than 16 megapixels"


def test_one_at_the_bound_is_shown_and_one_of_too_many_bytes_is_not():
    assert refusal("image/png", png(4000, 4000)) is None
    assert refusal("image/png", png(8, 8) + bytes(LARGEST)) == "it has more than 4 MiB"


def test_the_pictures_of_a_page_have_a_bound_together():
    data = png(8, 8) + bytes(LARGEST - 1000)
    rows = [{"digest": f"{number}", "media_type": "image/png", "data": data} for number in range(5)]
    page = Images(rows)
    shown = [page.of({"image_url": {"url": REFERENCE + row["digest"]}}) for row in rows]
    assert [each["why"] for each in shown if each] == [None] * 4 + ["the page shows enough images already"]
    assert MOST == 4 * LARGEST

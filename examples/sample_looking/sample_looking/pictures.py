"""The pictures and the request: plain functions that need nothing but the standard library."""

import base64
import random
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

REQUEST = "How many squares?"
TOOL = "look"
NAME_LETTERS = "abcdefghijklmnopqrstuvwxyz"
CELL, SIDE = 16, 2
"""Pixels of a cell, and cells a side: at most one square lies in each cell."""
COUNTS = (1, 2, 3, 4)
"""How many squares a picture has; each as often as the others, so that who does not look is right one time in four."""
Colour = tuple[int, int, int]


class Picture(NamedTuple):
    """A picture, as a data URL, and how many squares it has."""

    url: str
    count: int


def pictures(number: int, seed: int) -> Iterator[Picture]:
    """Yield `number` pictures; the first n are the same whatever `number` is."""
    draw = random.Random(seed)
    for index in range(number):
        # In turn, and not drawn: no number is more frequent than another by chance.
        count = COUNTS[index % len(COUNTS)]
        yield Picture(data_url(png(drawn(count, draw))), count)


def picture_names(number: int, seed: int) -> list[str]:
    """Return a name of three letters for each picture, no two alike; they say nothing of what is in it.

    Raises ValueError where there are not enough.
    """
    possible = len(NAME_LETTERS) ** 3
    if number > possible:
        raise ValueError(f"{number} pictures: there are {possible} names of three letters, so ask for fewer")
    chosen = random.Random(f"names {seed}").sample(range(possible), number)
    letters = len(NAME_LETTERS)
    return ["".join(NAME_LETTERS[each // letters**place % letters] for place in range(3)) for each in chosen]


def request_by_name(name: str) -> str:
    """Return the request to look at a picture that only the tool shows."""
    return f"{REQUEST} {name}"


def shuffled(found: list[Picture], seed: int) -> list[Picture]:
    """Return the pictures with the numbers of others: a control, in which looking does not help."""
    counts = [each.count for each in found]
    random.Random(f"shuffled {seed}").shuffle(counts)
    return [each._replace(count=count) for each, count in zip(found, counts, strict=True)]


def drawn(count: int, draw: random.Random) -> list[list[Colour]]:
    """Return the rows of pixels of a dark picture with `count` bright squares of any colour, size and place."""
    side = SIDE * CELL
    ground = draw.randrange(50)
    rows = [[(ground, ground, ground)] * side for _ in range(side)]
    for cell in draw.sample(range(SIDE * SIDE), count):
        size = draw.randint(8, 13)
        top, left = (CELL * place + draw.randint(1, CELL - size - 1) for place in divmod(cell, SIDE))
        colour = tuple(draw.randint(130, 255) for _ in range(3))
        for row in range(top, top + size):
            rows[row][left : left + size] = [colour] * size
    return rows


def png(rows: list[list[Colour]]) -> bytes:
    """Return pixels as a PNG file (ISO/IEC 15948): eight bits a channel, without filters."""
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 2, 0, 0, 0)
    lines = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in rows)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def data_url(data: bytes) -> str:
    """Return a PNG file as the URL that holds it."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def is_right(reply: str, count: int) -> bool:
    """Tell whether a reply is the number, and nothing else."""
    return reply.strip() == str(count)

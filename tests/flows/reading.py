"""Reads markdown as those do who are shown it, and says what they find in it."""

from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token

READERS = [MarkdownIt("commonmark"), MarkdownIt("gfm-like")]
"""As the standard has it, with HTML; and as GitHub has it, with tables and with links made of addresses and mail."""
for each in READERS:
    setattr(each, "validateLink", lambda url: True)  # noqa: B010
if READERS[1].linkify is not None:
    READERS[1].linkify.set({"fuzzy_link": False})  # a name with a dot is no address


def tokens(reader: MarkdownIt, text: str) -> Iterator[Token]:
    """All tokens of a text, those within others too."""
    for each in reader.parse(text):
        yield each
        yield from each.children or ()


def kinds(text: str) -> set[str]:
    return {each.type for reader in READERS for each in tokens(reader, text)}

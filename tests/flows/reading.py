"""Reads markdown as those do who are shown it, and says what they find in it."""

import re
from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token

READERS = [MarkdownIt("commonmark"), MarkdownIt("commonmark").enable(["table", "strikethrough"])]
"""As the standard has it, with HTML; and with what GitHub adds."""
for each in READERS:
    setattr(each, "validateLink", lambda url: True)  # noqa: B010
ADDRESS = re.compile(r"(?:https?|ftp)://|\bwww\.|\w@\w", re.IGNORECASE)
"""What GitHub's markdown makes a link of wherever it stands in a text."""


def tokens(reader: MarkdownIt, text: str) -> Iterator[Token]:
    """All tokens of a text, those within others too."""
    for each in reader.parse(text):
        yield each
        yield from each.children or ()


def kinds(text: str) -> set[str]:
    """The types of all that either reader finds in a text; addresses are links."""
    found = [each for reader in READERS for each in tokens(reader, text)]
    links = {"link_open" for each in found if each.type == "inline" and ADDRESS.search(each.content)}
    return links | {each.type for each in found}

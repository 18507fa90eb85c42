"""Channels: what of a reply others may hear, what only its member keeps, and what was merely thought."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from sample_arena.errors import ArenaError

NATIVE = "think"
"""The tag in which models think; what is in it belongs to no channel."""
NAME = re.compile(r"[a-z][a-z0-9_-]*")


@dataclass(frozen=True)
class Heard:
    """What others get of an utterance: there is nothing else in it that could leak."""

    member: str
    phase: str
    public: str


@dataclass(frozen=True)
class Utterance:
    """One turn of one member."""

    member: str
    phase: str
    raw: str
    """The reply as it came."""
    public: str
    """What all may hear."""
    private: str = ""
    """What the member noted for itself."""
    parse_error: bool = False
    """Whether the markup was broken: what cannot be told from a thought is then held back."""

    @property
    def heard(self) -> Heard:
        """The utterance as others hear it."""
        return Heard(self.member, self.phase, self.public)


@dataclass(frozen=True)
class Channels:
    """How replies are taken apart."""

    private_tag: str | None = None
    """The tag around what a member notes for itself; None where it has no such channel."""

    def __post_init__(self) -> None:
        if self.private_tag is not None and not NAME.fullmatch(self.private_tag):
            raise ArenaError(f"private tag {self.private_tag!r}: lower-case letters, digits, - and _, a letter first")
        if self.private_tag == NATIVE:
            raise ArenaError(f"private tag {NATIVE!r}: models think in it, and a thought is no note; choose another")

    def utterance(self, member: str, phase: str, raw: str) -> Utterance:
        """Return a reply taken apart; ends are trimmed, white space within stays.

        Thoughts are dropped whatever the private tag is. With broken markup (a block that never ends or never began,
        one that ends in another, half a tag) the flag is set, and what may have been a thought is in no channel.
        """
        split = _Split()
        for text, tag in _pieces(raw, tuple(filter(None, (NATIVE, self.private_tag)))):
            split.text(text)
            if tag is not None:
                split.tag(*tag)
        split.close()
        return Utterance(member, phase, raw, split.public.strip(), split.private, split.broken)


class _Split:
    """A reply being sorted into channels, from its first character to its last."""

    def __init__(self) -> None:
        self.public = ""
        self.private = ""
        self.broken = False
        self._open: list[str] = []
        self._note = ""

    def text(self, text: str) -> None:
        if not self._open:
            self.public += text
        elif len(self._open) == 1 and self._open[0] != NATIVE:
            self._note += text

    def tag(self, name: str, closing: bool, whole: bool) -> None:
        self.broken |= not whole
        if not closing:
            # A thought within a note is a thought; any other nesting is broken.
            self.broken |= bool(self._open) and (name != NATIVE or NATIVE in self._open)
            self._open.append(name)
        elif self._open and self._open[-1] == name:
            self._open.pop()
            if not self._open and name != NATIVE:
                self.private, self._note = f"{self.private}\n{self._note.strip()}".strip(), ""
        else:
            # What a stray end closes may have begun with the reply: nothing before it is safe to tell.
            self.broken = True
            if not self._open:
                self.public = ""

    def close(self) -> None:
        self.broken |= bool(self._open)


def _pieces(raw: str, names: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, bool, bool] | None]]:
    """Yield text and the tag after it, as its name, whether it closes and whether it is whole; no tag after the last.

    Half a tag swallows what is up to the next one, which may be the thought itself.
    """
    tags = re.compile(rf"<\s*(/?)\s*({'|'.join(map(re.escape, names))})(?![\w-])([^<>]*)(>?)", re.IGNORECASE)
    end = 0
    for found in tags.finditer(raw):
        closing, name, rest, bracket = found.groups()
        yield raw[end : found.start()], (name.lower(), bool(closing), bool(bracket) and not rest.strip())
        end = found.end()
    yield raw[end:], None

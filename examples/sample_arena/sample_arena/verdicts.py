"""Verdicts: the tokens by which a judge names a winner, told apart without doubt."""

from collections.abc import Mapping
from dataclasses import dataclass

from sample_arena.channels import NATIVE
from sample_arena.errors import ArenaError


@dataclass(frozen=True)
class Verdicts:
    """Which token names which member.

    Raises ArenaError where two could be taken for each other: equal but for case, one within the other, empty, or
    part of a tag that is taken out of replies.
    """

    tokens: Mapping[str, str]
    """The winner by token; tokens are found whatever their case."""

    def __post_init__(self) -> None:
        folded = [token.strip().casefold() for token in self.tokens]
        if not folded or not all(folded):
            raise ArenaError(f"verdict tokens {list(self.tokens)}: name at least one, none of them empty")
        for number, token in enumerate(folded):
            others = folded[:number] + folded[number + 1 :]
            if clash := next((other for other in others if token in other), None):
                raise ArenaError(f"verdict tokens {token!r} and {clash!r}: the first would be read in the second")
            if f"<{NATIVE}>".find(token) >= 0 or f"</{NATIVE}>".find(token) >= 0:
                raise ArenaError(
                    f"verdict token {token!r} is part of the tag {NATIVE!r}, which is taken out of replies"
                )
        if len(set(self.tokens.values())) != len(self.tokens):
            raise ArenaError(f"verdict tokens {dict(self.tokens)}: two name the same member")

    def winner(self, public: str) -> str | None:
        """Return the member that a judge's words name; None where they name nobody, or more than one."""
        said = public.casefold()
        named = [member for token, member in self.tokens.items() if token.strip().casefold() in said]
        return named[0] if len(named) == 1 else None

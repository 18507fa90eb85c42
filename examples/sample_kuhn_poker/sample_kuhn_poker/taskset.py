"""The taskset that verifiers loads under the id `sample_kuhn_poker`: its tasks are deals."""

from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from sample_kuhn_poker.rules import deals
from sample_kuhn_poker.talk import RULES

SEATS = ("player_0", "player_1")


class DealData(vf.TaskData):
    """Who holds what and who acts first; a seat's own task says less, see `seat`."""

    cards: dict[str, str]
    """The card of each seat that is known here: of both in the deal, of its own in a seat's task."""
    first: int = Field(ge=0, le=1)
    """The seat that acts first."""

    def seat(self, number: int) -> "DealData":
        """The deal as one seat sees it: its own card alone, and no prompt, since the game speaks first."""
        name = SEATS[number]
        own = {name: self.cards[name]}
        return self.model_copy(update={"cards": own, "idx": None, "id": None, "name": name})


class DealTask(vf.Task[DealData]):
    """A deal to be played; the game scores it, no trace alone could."""

    @property
    def key(self) -> str:
        """The cards in order of seats, and the seat that acts first: `JK-1`."""
        return f"{''.join(self.data.cards.get(name, '?') for name in SEATS)}-{self.data.first}"


class KuhnPokerConfig(vf.TasksetConfig):
    """How much the seats are told, and what becomes of a reply that names no allowed move."""

    explain_rules: bool = False
    """Whether a system prompt has the rules, for a model that was not warmed up on games."""
    unreadable: Literal["forfeit", "passive"] = "forfeit"
    """A reply that names no allowed move is played as a check, or as a fold before a bet. With `forfeit` the first seat
    to do so then loses a chip to the other, whatever the cards, so that models learn to be read. With `passive` the
    game counts as played, and the message is flagged as one that must not be trained on."""


class KuhnPokerTaskset(vf.Taskset[DealTask, KuhnPokerConfig]):
    """All twelve deals: six of the cards, with either seat acting first."""

    def load(self) -> Iterator[DealTask]:
        """Yield one task for each deal."""
        system = RULES if self.config.explain_rules else None
        for cards in deals():
            for first in range(len(SEATS)):
                held = dict(zip(SEATS, cards, strict=True))
                yield DealTask(DealData(cards=held, first=first, system_prompt=system), self.config.task)

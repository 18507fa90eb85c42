"""What a seat is told and how its reply is read: its own card, the public history, and nothing else."""

import re
from collections.abc import Sequence

from sample_kuhn_poker.rules import CARDS, legal

OPENING, CLOSING = "<move>", "</move>"
TAGGED = re.compile(re.escape(OPENING) + r"\s*(\w+)\s*" + re.escape(CLOSING))
RULES = (
    f"Kuhn poker. The deck is {', '.join(CARDS)}, lowest first; each of two players holds one card and has paid one "
    "chip. A bet and a call cost one chip more. A fold gives the chips away; otherwise the higher card takes them. "
    f"Reply with your move alone, one word, or as {OPENING}word{CLOSING}."
)
"""What a model is told that does not know the game."""


def request(history: Sequence[str], card: str = "") -> str:
    """What a seat is asked when it is to act: its card where it has not been told, the other's last move, its choice.

    Its own earlier moves stand in the conversation, so that this is the whole public history.
    """
    own = f"Card {card}. " if card else ""
    other = f"Opponent: {history[-1]}. " if history else ""
    return f"{own}{other}{' or '.join(legal(history))}?"


def move_of(reply: str, history: Sequence[str]) -> str | None:
    """The move that a reply names: the one tagged word in it, or the word that it is, upper or lower case.

    None where it names none, several, or one that is not allowed here.
    """
    tagged = TAGGED.findall(reply)
    words = tagged or [reply.strip()]
    move = words[0].lower()
    return move if len(words) == 1 and move in legal(history) else None

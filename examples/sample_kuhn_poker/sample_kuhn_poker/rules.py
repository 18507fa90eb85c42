"""The rules of Kuhn poker: plain functions that need nothing but the standard library.

Three cards, one for each of two players, an ante of one chip, and one round of betting with bets of one chip. Kuhn,
"A simplified two-person poker", Contributions to the Theory of Games I, 1950.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations

CARDS = ("J", "Q", "K")
"""From the lowest to the highest."""
CHECK, BET, CALL, FOLD = "check", "bet", "call", "fold"
History = tuple[str, ...]
"""The moves so far, in order; the players take turns."""
Cards = tuple[str, str]
"""The card of the player who acts first, and that of the other."""


class IllegalMove(ValueError):
    """A move that the rules do not allow where it was made."""


def deals() -> Iterator[Cards]:
    """Yield the six ways to deal two of the cards."""
    yield from permutations(CARDS, 2)


def faces_bet(history: Sequence[str]) -> bool:
    """Whether the player to act has to answer a bet."""
    return bool(history) and history[-1] == BET


def legal(history: Sequence[str]) -> tuple[str, ...]:
    """The moves that the player to act may choose from; empty where the game is over."""
    if faces_bet(history):
        return CALL, FOLD
    return () if is_over(history) else (CHECK, BET)


def passive(history: Sequence[str]) -> str:
    """The move that puts no chip in: a check, or a fold of the one who faces a bet."""
    return FOLD if faces_bet(history) else CHECK


def is_over(history: Sequence[str]) -> bool:
    """Whether nobody is to act any more: a bet was answered, or both checked."""
    return bool(history) and (history[-1] in (CALL, FOLD) or tuple(history) == (CHECK, CHECK))


def after(history: History, move: str) -> History:
    """The history with one more move. Raises IllegalMove where the rules do not allow it."""
    if move not in legal(history):
        allowed = " or ".join(legal(history)) or "none, the game is over"
        raise IllegalMove(f"move {move!r} after {list(history)}: allowed is {allowed}")
    return (*history, move)


def chips(cards: Cards, history: History) -> int:
    """Chips that the player who acts first wins, from -2 to 2; the other wins as many less than none.

    Raises IllegalMove where the game is not over.
    """
    if not is_over(history):
        raise IllegalMove(f"the game is not over after {list(history)}: nobody has won yet")
    if history[-1] == FOLD:
        first_folded = len(history) % 2 == 1
        return -1 if first_folded else 1
    at_stake = 2 if history[-1] == CALL else 1
    return at_stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -at_stake


def endings() -> list[History]:
    """All histories in which the game is over."""
    over: list[History] = []
    open_ones: list[History] = [()]
    while open_ones:
        history = open_ones.pop(0)
        following = [after(history, move) for move in legal(history)]
        over += [each for each in following if is_over(each)]
        open_ones += [each for each in following if not is_over(each)]
    return over

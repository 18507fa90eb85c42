"""What strategies are worth: exact values, best responses, and the known equilibria, to tell how far play is from them.

A strategy says, for each card and public history at which its player acts, how likely the active move is: to bet, or
to call. Numbers may be fractions, then everything is exact.
"""

from collections.abc import Mapping
from fractions import Fraction
from itertools import product
from typing import Any

from sample_kuhn_poker.rules import BET, CALL, CARDS, CHECK, Cards, History, after, chips, deals, is_over, legal

Strategy = Mapping[tuple[str, History], Any]
"""Probability of a bet or a call, by card and history."""
TURNS: tuple[tuple[History, ...], tuple[History, ...]] = (((), (CHECK, BET)), ((CHECK,), (BET,)))
"""The histories at which the first player acts, and those of the second."""
ACTIVE = (BET, CALL)


def value(first: Strategy, second: Strategy) -> Any:
    """Chips that the first player wins on average over all deals when the two strategies meet."""
    return sum(_expected(first, second, cards, ()) for cards in deals()) / Fraction(6)


def _expected(first: Strategy, second: Strategy, cards: Cards, history: History) -> Any:
    if is_over(history):
        return chips(cards, history)
    actor = len(history) % 2
    active = (first, second)[actor][cards[actor], history]
    return sum(
        share * _expected(first, second, cards, after(history, move))
        for move in legal(history)
        if (share := active if move in ACTIVE else 1 - active)
    )


def pure(player: int) -> list[Strategy]:
    """All strategies of a player that leave nothing to chance: 64 of them."""
    places = [(card, history) for card in CARDS for history in TURNS[player]]
    return [dict(zip(places, choice, strict=True)) for choice in product((0, 1), repeat=len(places))]


def nash_conv(first: Strategy, second: Strategy) -> Any:
    """Chips a game that both players together would gain by best responses to each other; 0 in equilibrium only.

    The literature also calls it NashConv, and half of it exploitability.
    """
    return max(value(each, second) for each in pure(0)) - min(value(first, each) for each in pure(1))


def equilibrium(bluff: Fraction) -> tuple[Strategy, Strategy]:
    """The equilibrium in which the first player bets a J with probability `bluff`, from 0 to 1/3; value -1/18.

    The second player's strategy is the same in all of them. Source: Kuhn 1950.
    """
    first: dict[tuple[str, History], Any] = {("J", ()): bluff, ("Q", ()): 0, ("K", ()): 3 * bluff}
    first |= {("J", TURNS[0][1]): 0, ("Q", TURNS[0][1]): bluff + Fraction(1, 3), ("K", TURNS[0][1]): 1}
    second: dict[tuple[str, History], Any] = {("J", (CHECK,)): Fraction(1, 3), ("Q", (CHECK,)): 0, ("K", (CHECK,)): 1}
    second |= {("J", (BET,)): 0, ("Q", (BET,)): Fraction(1, 3), ("K", (BET,)): 1}
    return first, second

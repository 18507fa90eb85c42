"""Facts about one seat's play, which tell whether it learns: how often it bet, called or folded with which card."""

from collections.abc import Sequence

from sample_kuhn_poker.rules import BET, CALL, FOLD, faces_bet

DOMINATED = frozenset({("J", CALL), ("K", FOLD)})
"""Answers to a bet that lose chips whatever the other holds: J never wins a showdown, K never loses one."""


def facts(card: str, moves: Sequence[tuple[Sequence[str], str]]) -> dict[str, float]:
    """Return metrics of a seat that held `card`, from its moves and the history before each.

    `bets_with_X` is there where the seat could have bet and `calls_with_X` where it had to answer a bet, 1 where it
    did and 0 where it did not, so that their means over games are frequencies; `folds_with_k`, a mistake whatever the
    other holds, likewise. `dominated_moves` counts mistakes of that kind, calls with J among them.
    """
    found: dict[str, float] = {}
    for history, move in moves:
        if faces_bet(history):
            found[f"calls_with_{card.lower()}"] = float(move == CALL)
            if card == "K":
                found["folds_with_k"] = float(move == FOLD)
        else:
            found[f"bets_with_{card.lower()}"] = float(move == BET)
    return {**found, "dominated_moves": float(sum((card, move) in DOMINATED for _, move in moves))}

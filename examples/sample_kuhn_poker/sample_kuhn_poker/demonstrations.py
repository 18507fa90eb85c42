"""Demonstrations of weak play for a supervised warm start: every allowed move, hardly led by the card."""

import random
from collections.abc import Iterator

from chat_loop.demonstrating import command, read

from sample_kuhn_poker.rules import BET, CALL, CARDS, CHECK, FOLD, Cards, History, after, deals, faces_bet, is_over
from sample_kuhn_poker.talk import request

Row = dict[str, list[dict[str, str]]]


def demonstrations(count: int, *, seed: int, lean: float = 0.15, unreadable: float = 0.0) -> Iterator[Row]:
    """Yield `count` conversations, each one seat's of a game of two weak players.

    They bet and call half of the time with a Q, with a K by `lean` more often and with a J by as much less: a model
    that has seen no use of its card takes long to find one. A share `unreadable` of the replies names no move. Raises
    ValueError unless `lean` is from 0 to 1/2 and `unreadable` from 0 to below 1.
    """
    if not (0 <= lean <= 0.5 and 0 <= unreadable < 1):
        raise ValueError(f"lean {lean} and unreadable {unreadable}: from 0 to 1/2, and from 0 to below 1")
    draw = random.Random(f"play {seed}")
    cards = list(deals())
    for _ in range(count):
        held, player = draw.choice(cards), draw.randrange(2)
        yield {"messages": _conversation(held[player], player, _game(held, draw, lean), draw, unreadable)}


def _game(held: Cards, draw: random.Random, lean: float) -> History:
    history: History = ()
    while not is_over(history):
        card = held[len(history) % 2]
        active, other = (CALL, FOLD) if faces_bet(history) else (BET, CHECK)
        chance = 0.5 + lean * (CARDS.index(card) - 1)
        history = after(history, active if draw.random() < chance else other)
    return history


def _conversation(
    card: str, player: int, game: History, draw: random.Random, unreadable: float
) -> list[dict[str, str]]:
    """What the player of that place in the order of acting is asked and says."""
    messages: list[dict[str, str]] = []
    for number in range(player, len(game), 2):
        asked = request(game[:number], "" if messages else card)
        said = card if draw.random() < unreadable else game[number]
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return messages


def words() -> list[str]:
    """What a small byte-level tokenizer shall keep whole, so that a game is a few dozen tokens."""
    questions = [request(()), request((BET,)).removeprefix(f"Opponent: {BET}. ")]
    told = [f"Card {card}. " for card in CARDS] + [f"Opponent: {move}. " for move in (CHECK, BET)]
    return [*questions, *told, CHECK, BET, CALL, FOLD, "user", "assistant", "\n\n"]


def main() -> None:
    """Run the command line."""
    parser = command(__doc__)
    parser.add_argument("--lean", type=float, default=0.15, help="how much the card tells, from 0 to 1/2")
    parser.add_argument("--unreadable", type=float, default=0.0, help="share of replies that name no move")
    files, choices = read(parser)
    files.write(demonstrations(**choices), words())


if __name__ == "__main__":
    main()

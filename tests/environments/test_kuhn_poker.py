"""Kuhn poker: every ending by hand, the known equilibrium, what a seat is told, and whole games of scripted players."""

import json
from collections import Counter
from itertools import cycle

import pytest
from sample_kuhn_poker.play import facts
from sample_kuhn_poker.rules import CARDS, IllegalMove, after, chips, deals, endings, legal, passive
from sample_kuhn_poker.talk import RULES, move_of, request
from sample_kuhn_poker.taskset import SEATS, KuhnPokerConfig, KuhnPokerTaskset

from tests.environments.scripted import SEED, played
from tests.fixtures.commands import cases

pytestmark = pytest.mark.engine

HIGHER_WINS = {("check", "check"): 1, ("bet", "call"): 2, ("check", "bet", "call"): 2}
FOLDED = {("bet", "fold"): 1, ("check", "bet", "fold"): -1}
"""What the first player wins, whatever the cards."""
FIRST_WINS = {("Q", "J"), ("K", "J"), ("K", "Q")}
DEALS = [(cards, first) for cards in deals() for first in (0, 1)]


@pytest.mark.parametrize("cards", list(deals()))
def test_every_ending_of_every_deal_pays_what_the_rules_say(cards):
    sign = 1 if cards in FIRST_WINS else -1
    assert {ending: chips(cards, ending) for ending in endings()} == {
        **{ending: sign * stake for ending, stake in HIGHER_WINS.items()},
        **FOLDED,
    }


def test_moves_out_of_turn_are_refused():
    for history, move in [((), "call"), (("bet",), "check"), (("check", "check"), "bet"), (("bet", "fold"), "call")]:
        with pytest.raises(IllegalMove, match=f"move '{move}'"):
            after(history, move)
    with pytest.raises(IllegalMove, match="nobody has won yet"):
        chips(("J", "K"), ("check", "bet"))
    assert [legal(ending) for ending in endings()] == [()] * 5
    assert [passive(history) for history in ((), ("check",), ("bet",))] == ["check", "check", "fold"]


@pytest.mark.parametrize(
    ("reply", "move"),
    [
        ("call", "call"),
        (" Fold\n", "fold"),
        ("I think <move>call</move>", "call"),
        ("<move> CALL </move>", "call"),
        ("<move>call</move><move>fold</move>", None),
        ("<move>call", None),
        ("call.", None),
        ("I call", None),
        ("check", None),  # not where there is a bet
        ("", None),
    ],
)
def test_a_reply_is_a_tag_or_a_word_or_nothing(reply, move):
    assert move_of(reply, ("check", "bet")) == move


def test_introspection_are_there_where_the_seat_had_the_choice():
    assert facts("J", [((), "bet")]) == {"bets_with_j": 1, "dominated_moves": 0}
    assert facts("J", [((), "check"), (("check", "bet"), "call")]) == {
        "bets_with_j": 0,
        "calls_with_j": 1,
        "dominated_moves": 1,
    }
    assert facts("K", [(("bet",), "fold")]) == {"calls_with_k": 0, "folds_with_k": 1, "dominated_moves": 1}
    assert facts("Q", [(("bet",), "fold")]) == {"calls_with_q": 0, "dominated_moves": 0}


def test_deals_have_stable_names():
    tasks = list(KuhnPokerTaskset(KuhnPokerConfig(id="sample_kuhn_poker")).load())
    assert [task.key for task in tasks] == [f"{a}{b}-{first}" for (a, b), first in DEALS]
    assert {task.data.system_prompt for task in tasks} == {None}
    explained = KuhnPokerTaskset(KuhnPokerConfig(id="sample_kuhn_poker", explain_rules=True)).load()
    assert {task.data.system_prompt for task in explained} == {RULES}


def game(replies, deal="KJ-0", limits=None, **settings):
    """Play one deal with these replies; return its episode, the traces in the order of the seats, and the requests."""
    said = iter(replies)
    taskset = {"id": "sample_kuhn_poker"} | settings
    (episode,), bodies = played(taskset, SEATS, lambda body: next(said), lambda task: task.key == deal, limits)
    return episode, sorted(episode.traces, key=lambda trace: trace.agent.name), bodies


class Games:
    """Every deal played to every ending, by players who are told which one."""

    def __init__(self):
        self.plan = [(cards, first, ending) for cards, first in DEALS for ending in endings()]
        moves = iter([move for _, _, ending in self.plan for move in ending])
        taskset = {"id": "sample_kuhn_poker"}
        self.episodes, self.bodies = played(taskset, SEATS, lambda body: next(moves), lambda task: len(endings()))


@pytest.fixture(scope="module")
def games():
    """The sixty games, played once."""
    return Games()


def test_chips_are_paid_once_to_both_seats_and_add_up_to_zero(games):
    assert len(games.episodes) == len(games.plan) == 60
    for episode, (cards, first, ending) in zip(games.episodes, games.plan, strict=True):
        assert episode.ok and not episode.errors
        acting = cards if first == 0 else (cards[1], cards[0])
        won = chips(acting, ending)
        traces = {trace.agent.name: trace for trace in episode.traces}
        assert set(traces) == set(SEATS) and len(episode.traces) == 2
        assert [list(trace.rewards) for trace in episode.traces] == [["outcome"]] * 2
        assert traces[SEATS[first]].reward == won == -traces[SEATS[1 - first]].reward
        for number, name in enumerate(SEATS):
            trace = traces[name]
            assert trace.info == {"moves": list(ending[(number != first) :: 2]), "unreadable": []}
            assert trace.metrics["acts_first"] == (number == first) and trace.metrics["unreadable_moves"] == 0
            assert trace.metrics["num_moves"] == len(ending)
            assert trace.metrics["showdown"] == (ending[-1] != "fold")
            assert trace.num_branches == 1 and len(trace.branches[0].messages) == 2 * len(trace.info["moves"])
            assert trace.agent.trainable


def test_no_seat_is_told_the_card_of_the_other(games):
    told = Counter()
    requests = iter(games.bodies)
    for cards, first, ending in games.plan:
        for number in range(len(ending)):
            body = next(requests)
            seat = (first + number) % 2
            assert body["model"] == SEATS[seat], "the seats act in turn"
            said = json.dumps(body["messages"])
            own, other = cards[seat], cards[1 - seat]
            assert f"Card {own}." in said and f"Card {other}." not in said
            assert not {*CARDS} - {own} & {*said.replace("Card ", "")}
            assert body["messages"][-1]["content"] == request(ending[:number], own if number < 2 else "")
            told[said] += 1
    assert len(told) == 12, "as many as the game has information sets: three cards at four histories"


def test_the_seats_of_a_game_do_not_sample_with_one_seed(games):
    assert {body["model"]: body["seed"] for body in games.bodies} == {"player_0": SEED, "player_1": SEED + 1}
    assert len({(body["model"], body["seed"]) for body in games.bodies}) == 2


def test_what_cannot_be_read_is_flagged_and_played_as_the_passive_move():
    _, (zero, one), _ = game(["check", "bet", "what?"], unreadable="passive")
    assert zero.info == {"moves": ["check", "fold"], "unreadable": [2], "parse_errors": [3]}
    assert zero.nodes[3].sampled and zero.nodes[3].message.content == "what?"
    assert (zero.reward, one.reward) == (-1, 1), "a fold, with the higher card"
    assert zero.metrics == {"unreadable_moves": 1, "acts_first": 1, "showdown": 0, "num_moves": 3}
    assert one.metrics["bets_with_j"] == 1 and one.metrics["unreadable_moves"] == 0


@cases(__file__, "unreadable")
@pytest.mark.parametrize("deal", ["KJ-0", "JK-0"])
def test_the_first_who_cannot_be_read_loses_a_chip_whatever_the_cards(said, moves, loser, deal):
    _, traces, bodies = game(said, deal)
    assert len(bodies) == len(said)
    assert [trace.info["moves"] for trace in traces] == moves
    assert [trace.reward for trace in traces] == ([-1, 1] if loser == 0 else [1, -1])
    assert traces[loser].metrics["unreadable_moves"] >= 1
    assert not any("parse_errors" in trace.info for trace in traces)


def test_a_seat_that_failed_leaves_both_unscored():
    episode, (zero, one), _ = game(cycle(["check", 400]))
    assert one.errors and not one.ok and zero.ok and not episode.ok
    for trace in (zero, one):
        assert trace.rewards == {"outcome": None}
        assert trace.info["episode_error"] == "player_1 failed before the game was over"

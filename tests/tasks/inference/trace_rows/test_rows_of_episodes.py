"""Rows of an episode in which something failed: whose reward is real, whose is not, and what is tried again."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest

from tasks.evaluation.stage import estimates
from tasks.inference.sampling.episode_rows import episode_rows
from tasks.inference.sampling.seats import SeatClient, Seats
from tasks.inference.trace_rows.rows import RolloutOrigin, trace_tables
from tests.environments import scripted
from tests.fixtures.shapes import Player, blank, sent

pytestmark = pytest.mark.engine

ORIGIN = RolloutOrigin({"assignment_id": "g/0", "group_id": "g", "environment": "e", "example_id": "x"}, "p", 0, 0, 1.0)
POLICY = SeatClient(SimpleNamespace(base_url="http://policy/v1"), "m")
REPLY = {"content": "yes", "reasoning_content": None, "calls": []}
BUSY = ("ProviderError", 503)
PLANTED = ("TaskError", None)
SCORED = (0.5, None)
LOST = (None, "infrastructure")


def rows_of(members, wrong=None, **noted):
    """Return rows by agent, and the cause of an episode.

    `members` has what each earned, or its error, or None where it was not scored; who is in capitals is never trained.
    """
    from verifiers.v1.trace import Error

    traces = [blank(name.lower()) for name in members]
    turns = [partial(Player(trace).move, "asks", "well?", REPLY) for trace in traces]

    def finish():
        for trace, (name, came) in zip(traces, members.items(), strict=True):
            trace.agent.trainable = name.islower()
            trace.info.update(noted.get("info", {}))
            if isinstance(came, tuple):
                trace.ok, trace.errors = False, [Error(type=came[0], message="gone", status_code=came[1])]
            elif came is None:
                trace.rewards["r"] = None
            else:
                trace.record_reward("r", came)

    episode = asyncio.run(sent(traces, [*turns, finish]))
    episode.ok = wrong is None and all(trace.ok for trace in traces)
    episode.errors = [Error(type=wrong[0], message="the program fell", status_code=wrong[1])] if wrong else []
    (rows, _), cause = episode_rows(wire(episode), ORIGIN, Seats("e", {}), POLICY)
    return {row["agent"]: row for row in rows}, cause


def played(members, wrong=None, **noted):
    """Return (reward, class) by agent, and the cause."""
    rows, cause = rows_of(members, wrong, **noted)
    return {agent: (row["reward"], row["error_class"]) for agent, row in rows.items()}, cause


def wire(episode):
    """An episode as it comes over the wire."""
    from verifiers.v1.episode import WireEpisode
    from verifiers.v1.serve.delta import dump

    return WireEpisode.model_validate(dump(episode))


def kind(cause):
    return cause.kind if cause else None


def test_peers_of_a_failed_agent_keep_what_they_earned():
    rows, cause = played({"first": 0.5, "second": BUSY, "third": 0.0})
    assert rows == {"first": SCORED, "second": LOST, "third": (0.0, None)}
    assert kind(cause) == "infrastructure"
    assert played({"first": 0.5}) == ({"first": SCORED}, None)


@pytest.mark.parametrize("order", [("assistant", "USER"), ("USER", "assistant")])
def test_what_was_earned_with_a_user_whose_model_was_gone_is_no_reward(order):
    """A conversation that broke off would be scored as the policy's failure."""
    came = {"assistant": 0.5, "USER": BUSY}
    rows, cause = played({name: came[name] for name in order})
    assert rows == {"assistant": LOST, "user": LOST} and kind(cause) == "infrastructure"


def test_what_an_environment_scored_in_knowledge_of_the_failure_stands():
    rows, cause = played({"first": 0.5, "SECOND": BUSY}, info={"episode_error": "second failed"})
    assert rows == {"first": SCORED, "second": LOST} and kind(cause) == "infrastructure"
    fallen, _ = played({"first": 0.5, "SECOND": BUSY}, ("EnvError", None), info={"episode_error": "second failed"})
    assert fallen["first"] == (None, "environment"), "not where its program fell"


def test_the_row_says_whose_failure_it_was():
    rows, _ = rows_of({"assistant": 1.0, "USER": BUSY})
    assert rows["assistant"]["error_message"].startswith("agent 'user' of its episode failed: gone")
    assert rows["user"]["error_message"].startswith("gone")


def test_the_code_of_a_task_that_fails_on_an_opponent_takes_nothing_from_the_policy():
    rows, cause = played({"first": 0.5, "SECOND": PLANTED})
    assert rows == {"first": SCORED, "second": (None, "environment")} and kind(cause) == "environment"


def test_an_episode_that_fell_has_no_rewards():
    rows, cause = played({"first": 0.5, "JUDGE": 0.0}, wrong=("EnvError", None))
    assert rows == {"first": (None, "environment"), "judge": (None, "environment")}
    assert kind(cause) == "environment"


def test_what_is_tried_again_is_the_failure_and_not_what_followed_from_it():
    """Peers that nobody could score then, or a program that gave up, come first in the episode as often as not."""
    assert kind(played({"second": None, "first": BUSY})[1]) == "infrastructure"
    assert kind(played({"second": 0.5, "first": BUSY}, wrong=("EnvError", None))[1]) == "infrastructure"
    assert kind(played({"second": None, "first": 0.5}, wrong=("ProviderError", 503))[1]) == "infrastructure"
    assert kind(played({"second": None, "first": 0.5})[1]) == "incomplete"
    assert kind(played({"second": PLANTED, "first": BUSY})[1]) == "environment", "the first of several"


@pytest.mark.usefixtures("plugins")
def test_a_seat_that_never_had_to_move_keeps_its_reward():

    (episode,), _ = scripted.played({"id": "forfeits"}, ("first", "second"), lambda body: "no move at all")
    rows, cause = episode_rows(wire(episode), ORIGIN, Seats("e", {}), SeatClient(SimpleNamespace(base_url=""), "m"))
    assert rows is not None and cause is None, "nothing is to be tried again"
    assert {row["agent"]: (row["reward"], row["error_class"], row["num_turns"]) for row in rows[0]} == {
        "first": (-1.0, None, 1),
        "second": (1.0, None, 0),
    }
    # The model goes by the seat's name here and so is not the policy's.
    played_by_policy = [row | {"trainable": True} for row in rows[0]]
    (found,) = estimates(trace_tables(played_by_policy, rows[1])["traces"])
    assert (found.average, found.errors, found.num_attempts) == (0.0, {}, 2)

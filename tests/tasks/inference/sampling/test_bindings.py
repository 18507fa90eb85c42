"""Which model plays which seat of an episode: the function that says it, its names, and the rows that follow."""

import asyncio
from types import SimpleNamespace

import pytest

from configs.environments import EnvironmentConfig
from configs.run import RunConfig
from tasks.inference.engine.client import MODEL, OF_POLICY, ServedModel
from tasks.inference.sampling import rollout_runner
from tasks.inference.sampling.bindings import EpisodeInfo, SeatBindings
from tasks.inference.sampling.crash_isolation import InFlightRollout
from tasks.inference.sampling.seats import SeatClient, Seats, seat_model_name
from tasks.inference.trace_rows.rows import RolloutOrigin
from tasks.runtime.stage import Policy

CLIENT, RIVAL = (SimpleNamespace(base_url=f"http://{name}/v1", headers={}) for name in ("policy", "rival"))
FIRST, THIRD, PLACE = Policy("first", 0), Policy("third", 3), seat_model_name("e", "bindings.models.rival")
BESIDE = {
    "base": ServedModel("", "", MODEL, "first", policy=FIRST),
    "policy-3": ServedModel("", "", "third", "third", policy=THIRD),
}
SERVED = {
    OF_POLICY: ServedModel("http://policy", "", "sixth", "sixth", beside=BESIDE),
    PLACE: ServedModel("http://rival", "", MODEL, "its weights"),
}
CLIENTS, CALLS = {OF_POLICY: CLIENT, PLACE: RIVAL}, []


def choose(episode, binding):
    """Return what a test wants."""
    CALLS.append(episode)
    return binding


def environment(binding=None, **seats):
    models = {"base": {"base": True}, "recent": {"earlier": 3}, "rival": {"path": "w"}, "unserved": {"path": "w"}}
    bindings = {"function": f"{__name__}:choose", "arguments": {"binding": binding}, "models": models}
    section = {"name": "e", "taskset": {"id": "t"}, "seats": seats, "bindings": bindings}
    return EnvironmentConfig.model_validate(section)


def assignment(group_id):
    return {"environment": "e", "example_id": "x", "group_id": group_id, "member": 4, "seed": 9}


@pytest.mark.parametrize(("group_id", "step"), [("12.1-3", 12), ("eval-e-3", 7)])
def test_the_function_is_given_the_episode_of_the_step_that_it_was_assigned_for(group_id, step):
    assert SeatBindings([environment({"left": "rival"})], 7).of(assignment(group_id), {"prompt": "p"})
    assert CALLS.pop() == EpisodeInfo("e", "x", {"prompt": "p"}, step, 4, 9)


@pytest.mark.parametrize(
    ("name", "player"),
    [
        ("base", SeatClient(CLIENT, MODEL, "first", FIRST)),
        ("recent", SeatClient(CLIENT, "third", "third", THIRD)),
        ("rival", SeatClient(RIVAL, MODEL, "its weights")),
        ("policy", None),
    ],
)
def test_a_seat_is_played_by_the_model_of_its_name(name, player):
    """Also where the section of the seat names another one; a seat that is not bound keeps that."""
    base = {"model": {"base": True}}
    seats = Seats.of(environment(left=base, right=base), SERVED, CLIENTS, {"left": name})
    others = {"right": SeatClient(CLIENT, MODEL, "first", FIRST)}
    assert seats.players == others | ({"left": player} if player else {})
    assert seats.names == {"right": "base"} | ({"left": name} if player else {})


@pytest.mark.parametrize(
    ("binding", "says"),
    [
        (None, f"{__name__}:choose returned None, and no mapping"),
        (
            {"left": "bas"},
            "there is no model 'bas' here, but policy, base, recent, rival, unserved; did you mean base?",
        ),
        ({"left": "unserved"}, "seat 'left' of 'e' would fall to the policy"),
    ],
)
def test_a_function_that_fails_costs_its_own_rollout(binding, says, monkeypatch):
    monkeypatch.setattr(rollout_runner, "client_config", lambda *_: SimpleNamespace(model_copy=lambda **_: CLIENT))
    config = RunConfig(environments=(environment(binding),))
    runner = rollout_runner.RolloutRunner(SERVED, None, None, Policy("sixth", 6), 6, config)
    origin = RolloutOrigin(assignment("6-0"), "sixth", 6, 6, 1.0)
    rows, failure = asyncio.run(runner._attempt(origin, {}, InFlightRollout("6-0/0", "6-0", "e"), 0))
    assert rows is None and failure.kind == "environment" and failure.message.startswith(f"bindings: {says}")

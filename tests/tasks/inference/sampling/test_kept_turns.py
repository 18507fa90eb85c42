"""Which kept turns a rollout may use: those of its own policy, or in a stream of all that its group may be of."""

import asyncio
from types import SimpleNamespace

import pytest
from verifiers.v1.configs.client import EvalClientConfig

from configs.environments import EnvironmentConfig
from storage.store import open_store
from storage.turns import CachedTurn, TurnCache
from tasks.inference.sampling.crash_isolation import InFlightRollout
from tasks.inference.sampling.rollout_runner import RolloutRunner, _kept_turn
from tasks.inference.sampling.seats import SeatClient, Seats
from tasks.inference.trace_rows.rows import TURNS_FIELD, RolloutOrigin
from tasks.runtime.stage import Policy

POLICIES = {"old": 0, "own": 1, "new": 2}


def answer(*policies):
    """An answer of an engine that says which policies sampled it."""
    runs = ",".join(f'["{each}",4]' for each in policies)
    return f'{{"policies":[{runs}],"request_id":"r","choices":[]}}'


def turn(request, *policies, said, member=0):
    return CachedTurn("g", f"g/{member}", request, answer(*policies) if said else "{}", policies)


@pytest.fixture
def kept(tmp_path):
    return TurnCache(open_store(tmp_path), "run")


def runner(kept, versions, oldest=None):
    """A runner that has begun the group with that as its oldest version."""
    made = object.__new__(RolloutRunner)
    vars(made).update(policy=Policy("own", 1), versions=versions, oldest={"g": oldest}, unproven=None, _turns=kept)
    return made


def origin(policy="own"):
    assignment = {"group_id": "g", "assignment_id": "g/0", "environment": "e"}
    return RolloutOrigin(assignment, policy, POLICIES.get(policy, 0), step=1, temperature=1.0)


@pytest.mark.parametrize(
    ("versions", "oldest", "said", "usable"),
    [
        ({}, None, False, {"own", "frozen"}),
        ({}, None, True, {"frozen"}),  # its tokens would say that they are of several policies
        (POLICIES, 0, True, {"old", "own", "new", "mixed", "frozen"}),
        (POLICIES, 1, True, {"own", "new", "frozen"}),
        (POLICIES, 1, False, {"frozen"}),  # nobody knows which tokens which policy sampled
    ],
)
def test_turns_of_policies_that_the_group_may_be_of_are_used(kept, versions, oldest, said, usable):
    for each in ("old", "own", "new", "unknown"):
        kept.put(turn(each, each, said=said))
    kept.put(turn("mixed", "old", "own", said=said))
    kept.put(turn("frozen", said=False))
    kept.put(turn("another", "own", said=said, member=1))
    assert runner(kept, versions, oldest)._usable(kept, origin()).keys() == usable
    assert runner(kept, versions).versions_of_turns("g") == set(versions.values())


@pytest.mark.parametrize(
    ("policy", "played", "policies"),
    [
        ("own", {"model": "policy", "answer": "{}"}, ("own",)),
        ("own", {"model": "policy", "answer": answer("old", "own")}, ("old", "own")),
        ("own", {"model": "opponent", "answer": "{}"}, ()),
        ("", {"model": "policy", "answer": "{}"}, ()),  # a teacher's rollout
    ],
)
def test_a_turn_is_of_the_policies_that_sampled_it_and_of_none_where_a_frozen_model_did(policy, played, policies):
    found = _kept_turn(origin(policy), "policy", {"request": "r", **played})
    assert found == CachedTurn("g", "g/0", "r", played["answer"], policies)


def test_turns_of_weights_that_are_not_proven_are_kept_when_they_are(kept):
    client = SeatClient(EvalClientConfig(), "policy")
    sampling = None

    def play(by, policy):
        async def play_turn(placed, client, model, parameters, task, keep):
            turn = {"request": f"of {policy}", "model": "policy", "answer": answer(policy)}
            keep({"set": {"info": {TURNS_FIELD: [turn]}}})
            return {}

        by.environments = {"e": EnvironmentConfig(name="e", taskset={"id": "t"})}
        by.servers = SimpleNamespace(play=play_turn)
        asyncio.run(by._play(origin(), InFlightRollout("g/0", "g", "e"), (client, Seats("e", {})), {}, sampling))
        return [turn.request for turn in kept.of("g")]

    sampler = runner(kept, POLICIES)
    assert play(sampler, "old") == ["of old"]
    sampler.begin_exchange()
    assert play(sampler, "own") == ["of old"]
    sampler.end_exchange()
    assert play(sampler, "new") == ["of old", "of own", "of new"]
    sampler.begin_exchange()  # which fails: what was sampled since is of wrong weights
    assert play(sampler, "wrong") == ["of old", "of own", "of new"] == play(runner(kept, POLICIES), "new")

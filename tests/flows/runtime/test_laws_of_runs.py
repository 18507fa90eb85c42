"""Laws of every kind of run: killed anywhere it is the run that it would have been, and all of it is found again."""

import hashlib
from contextlib import contextmanager
from functools import cache

import pyarrow as pa
import pytest

from flows.runtime.loop import plan_work
from storage.schemas.stage_tables import EXAMPLES
from storage.store import open_store
from tasks.runtime.imports import code_version
from tests.fixtures import rehearsal
from tests.fixtures.builders import example
from tests.fixtures.histories import results
from tests.fixtures.rehearsal import (
    EQUAL,
    POOLS,
    RAE,
    REFILL,
    REFILLED_POOLS,
    SOURCE,
    die,
    play,
    play_equal,
    rehearse,
    session_for,
)
from tests.fixtures.replays import ask, missing, pieces, walk

pytestmark = pytest.mark.engine

REMEMBERING = "tests.fixtures.masks:remembering"
NAMES = ("plain", "remembered")
STATEFUL = {"type": "custom", "function": REMEMBERING, "keeps_state": True, "version": code_version(REMEMBERING)}
MIXED = {
    "steps": 3,
    "rollout": {"max_off_policy_steps": 1},
    "assignment": {"groups_per_step": 6, "group_size": 4, "refill": True, "sampler": {"type": "difficulty_pools"}},
    "algorithm": {"type": "dr_grpo", "length_normaliser": 8, "overlong": {"max_tokens": 8, "buffer_tokens": 4}},
    "admission": {},
    "environments": (
        {"name": "plain", "taskset": {"id": "plain"}},
        {"name": "remembered", "taskset": {"id": "remembered"}, "weight": 2.0, "algorithm": STATEFUL},
    ),
}
"""Everything in one run: two environments, one with state, groups replaced, examples by difficulty, a lag of one."""


def luck(_, row):
    """Let some groups earn the same, and some fail, as the group's name and the policy say."""
    found = hashlib.sha256(f"{row['group_id']} {row['policy_version']}".encode()).digest()[0]
    return {"reward": 1.0} if found % 3 == 0 else {"error_class": "TimeoutError"} if found % 5 == 0 else {}


def listed(tables, view):
    rows = [example(f"{name}-{number}", name) for name in NAMES for number in range(8)]
    return {"examples": pa.Table.from_pylist(rows, schema=EXAMPLES.arrow)}


def play_mixed(patch):
    play(patch, rollout=rehearsal.sampled_with(luck), examples=listed)


KINDS = {
    "refill": (REFILL, lambda patch: play_equal(patch, EQUAL)),
    "pools": (POOLS, lambda patch: play_equal(patch, {"1-0", "0-2"})),
    "pools and refill": (REFILLED_POOLS, lambda patch: play_equal(patch, {"1-0", "0-2"})),
    "stateful": (RAE, lambda patch: play(patch, rollout=rehearsal.in_turns)),
    "mixed": (MIXED, play_mixed),
}
"""By name, the settings of a kind of run, and what is played in it."""


@contextmanager
def played(kind):
    """Within the block runs of a kind are played; give their settings."""
    settings, play_kind = KINDS[kind]
    with pytest.MonkeyPatch.context() as patch:
        play_kind(patch)
        yield settings


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """Return a function that returns the store of an undisturbed run of a kind."""

    @cache
    def store_of(kind):
        root = tmp_path_factory.mktemp("origin") / "store"
        with played(kind) as settings:
            rehearse(root, "base", **settings)
        return root

    return store_of


def rows(store):
    """The digests of all rows of the run, by the key of the work and the table."""
    entries = store.ledger.entries(run="base")
    return {(entry.key, piece.table): [piece.digest] for entry in entries for piece in entry.outputs}


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        *(("refill", last) for last in (6, 9, 14)),
        *((kind, last) for kind in ("pools", "pools and refill") for last in (8, 15)),
        ("stateful", 13),  # after the advantages of the second step
        ("stateful", 15),  # after its training
        *(("mixed", last) for last in (9, 20)),
    ],
)
def test_killed_anywhere_it_goes_on_as_if_it_had_not(origin, root, kind, last):
    whole = rows(open_store(origin(kind)))
    with played(kind) as settings:
        die(root, "base", last, **settings)
        assert len(rows(open_store(root))) < len(whole)
        assert rows(rehearse(root, "base", **settings)) == whole


@pytest.mark.parametrize("kind", ["stateful", "pools"])
def test_a_longer_run_goes_on_from_the_state_of_the_shorter(origin, root, kind):
    with played(kind) as settings:
        rehearse(root, "base", **settings | {"steps": 1})
        assert rows(rehearse(root, "base", **settings)) == rows(open_store(origin(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recorded_is_foretold(origin, kind):
    with played(kind) as settings:
        foretold = plan_work(session_for(origin(kind), "base", **settings).context, SOURCE)
    entries = open_store(origin(kind)).ledger.entries(run="base")
    assert not any(ref.computed for ref in foretold) and {ref.key for ref in foretold} == {each.key for each in entries}


@pytest.mark.parametrize(
    ("kind", "begin", "steps"),
    [
        *(("refill", begin, "") for begin in ("assignment", "rollout", "filtering", "packing")),
        *((kind, "assignment", steps) for kind in ("pools", "pools and refill") for steps in ("", "1:")),
        ("stateful", "advantage", "1:"),
    ],
)
def test_a_replay_with_the_same_settings_finds_everything(origin, weights, kind, begin, steps):
    with played(kind):
        config = ask(origin(kind), from_stage=begin, until="training", steps=steps)
        assert missing(config) == []
        assert walk(config)[0].num_computed == 0


def test_every_part_of_a_mixed_run_has_work_to_do_and_is_found(origin):
    store = open_store(origin("mixed"))
    assert len(results(store, "assignment")) > MIXED["steps"], "groups were replaced"
    state = max(results(store, "advantage"), key=lambda entry: entry.finished_at)
    assert state.step == MIXED["steps"] - 1 and "advantage" in state.inputs
    kept = store.read(state.slices("estimator_states"), ["environment"])["environment"].to_pylist()
    assert {*kept} == {"remembered"}
    for steps in ("", "1:"):
        found = pieces(ask(origin("mixed"), from_stage="filtering", steps=steps))
        assert {ref.stage for ref in found if ref.computed} == {"metrics"}, "it ends earlier than the run did"

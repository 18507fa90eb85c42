"""A flow whose steps take their rollouts from a stream dies by SIGKILL; called again, it uses what is committed."""

import pytest

from storage.store import open_store
from tests.crash.checks import check_clean, killed
from tests.fixtures.driving import check_once, check_replayed, committed_groups, rows, weights
from tests.fixtures.faults import happened

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

STEPS, BOUND, POINTS = 4, 2, 30
STREAM = (f"steps={STEPS}", f"rollout.max_off_policy_steps={BOUND}")
GROUPS = {f"{step}-{slot}" for step in range(STEPS) for slot in range(3)}
MOMENTS = ["sampling 0-0", "before commit rollout 0", "after commit rollout 1 part #2", "after request train #2"]
IN_CI = {"after commit rollout 1 part #2"}


@pytest.mark.fault(
    "process", "a flow that samples a stream is killed at a moment", "committed groups stay where they are"
)
@pytest.mark.parametrize(
    "moment", [pytest.param(each, marks=[] if each in IN_CI else pytest.mark.nightly) for each in MOMENTS]
)
def test_a_killed_stream_goes_on_from_what_is_committed(moment, drive):
    run = drive(*STREAM)
    first = killed(run, moment)
    happened(f"SIGKILL to {first.receipts[0]['pid']}, the last moment {moment}")
    store = open_store(run.store)
    safe, before = committed_groups(store), dict(weights(store)) if "policies" in rows(store) else {}
    again = run.live(backwards=True)
    assert again.status == 0, again.output
    assert set(again.sampled) == GROUPS - safe and len(again.sampled) == len(set(again.sampled))
    store = open_store(run.store)
    check_once(run.store)
    taken = rows(store)["intakes"]
    assert sorted(row["group_id"] for row in taken) == sorted(GROUPS)
    assert [sum(row["step"] == step for row in taken) for step in range(STEPS)] == [3] * STEPS
    assert all(0 <= row["age"] <= BOUND for row in taken)
    assert dict(weights(store)).items() >= before.items()
    check_clean(run)
    # And once more: nothing is left to do, and nothing is sampled.
    assert run.live().sampled == ()


@pytest.fixture(scope="module")
def undisturbed(drive):
    """The moments of a stream that nobody killed."""
    life = drive(*STREAM).live()
    assert life.status == 0, life.output
    # Of a pair of commits that go together which one is first depends on time, and so does what is committed alone.
    return tuple(each for each in life.moments if "several" not in each)


@pytest.mark.nightly
@pytest.mark.fault("process", "a flow that samples a stream is killed at a moment", "and what it made is replayed")
@pytest.mark.parametrize("point", range(POINTS))
def test_a_stream_survives_kills_at_points_all_over_it(point, undisturbed, drive):
    moment = undisturbed[point * len(undisturbed) // POINTS]
    run = drive(*STREAM)
    # At one point in three it is the learner that dies, under the flow.
    lost = point % 3 == 2
    first = run.live(lose=moment) if lost else run.live(moment)
    happened(f"{'the learner was killed' if lost else 'SIGKILL'} at {moment}")
    # Which moments a stream has depends on what ended first: one that never came changed nothing.
    assert first.status in ((0,) if lost else (0, -9)), first.output
    safe = committed_groups(open_store(run.store))
    again = run.live(backwards=True)
    assert again.status == 0, again.output
    assert set(again.sampled) == GROUPS - safe
    check_once(run.store)
    store = open_store(run.store)
    taken = rows(store)["intakes"]
    assert sorted(row["group_id"] for row in taken) == sorted(GROUPS) and max(row["age"] for row in taken) <= BOUND
    check_clean(run)
    # A replay goes through the recorded rollouts and samples nothing; what it trains again comes out the same.
    check_replayed(run, STEPS)

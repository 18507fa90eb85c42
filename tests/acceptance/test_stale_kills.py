"""A real run with groups that come to be stale, killed with its services while these are recorded and replaced.

Four processes share the work; in each, the first rollouts that its environment server begins wait for ever. The first
loses its engine before a stale group is recorded, and is killed before that is committed. The second is killed once it
is, the third before what replaces it is committed. The fourth loses all its services and comes to the run's end.
"""

import pytest

from tests.acceptance.lives import LivedRun
from tests.fixtures.driving import Driven, check_once, check_replayed, committed_rows, rows
from tests.fixtures.faults import happened

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]

STEPS, GROUPS, MEMBERS, BOUND = 20, 3, 2, 2
SETTINGS = (
    f"steps={STEPS}",
    'environments=[{name="straggling",taskset={id="straggling"},harness={id="chat_loop"},max_turns=2}]',
    f"assignment.groups_per_step={GROUPS}",
    f"assignment.group_size={MEMBERS}",
    f"rollout.max_off_policy_steps={BOUND}",
    'rollout.weight_update="keep"',
    "rollout.max_tokens=8",
    "rollout.max_in_flight=24",
    "rollout.timeout_seconds=3000",
    "engine.max_restarts=5",
)
LIVES = (
    {"before append of stale groups": "engine", "before commit of stale groups": "flow"},
    {"after commit of stale groups": "flow"},
    {"after append of replacements": "flow"},
    {
        "before append of stale groups": "environment",
        "after commit of stale groups": "engine",
        "after append of replacements #2": "learner",
    },
)


@pytest.mark.fault(
    "services",
    "flow, engine, environment server and learner are killed while stale groups are recorded and replaced",
    "each group is taken or stale, once, and what is recorded stays so",
)
@pytest.mark.parametrize("stale", ["drop", "top_up"])
def test_whatever_is_killed_a_stale_group_is_recorded_once_and_replaced(stale, tmp_path):
    taken, lost = dict[str, str](), dict[str, str]()
    with LivedRun(tmp_path, *SETTINGS, f"rollout.stale={stale}", plugins=True) as run:
        for kills in LIVES:
            run.live(kills, 0 if kills is LIVES[-1] else -9)
            safe, gone = (
                {row["group_id"]: row["policy_key"] for row in committed_rows(run.store, name)}
                for name in ("intakes", "stale_groups")
            )
            assert safe.items() >= taken.items() and gone.items() >= lost.items(), "a group is not what it was"
            taken, lost = safe, gone
    receipts = [receipt["moment"] for receipt in run.receipts]
    assert receipts == [moment for kills in LIVES for moment in kills]
    happened(", ".join(receipts))
    check_once(run.root)
    found = rows(run.store)
    check_accounted(found)
    check_replaced(found, keeps_examples=stale == "top_up")
    check_replayed(Driven(tmp_path, ()), STEPS)


def check_accounted(found):
    """Each group that was assigned is in one step or stale, with each of its members; nothing else went wrong."""
    taken, stale = ({row["group_id"]: row for row in found[name]} for name in ("intakes", "stale_groups"))
    assigned = {row["group_id"] for row in found["assignments"]}
    assert not taken.keys() & stale.keys() and taken.keys() | stale.keys() == assigned and stale
    assert [sum(row["step"] == step for row in taken.values()) for step in range(STEPS)] == [GROUPS] * STEPS
    assert all(0 <= row["age"] <= BOUND for row in taken.values())
    assert all(row["step"] - row["policy_version"] >= BOUND for row in stale.values())
    assert {row["assignment_id"] for row in found["traces"]} == {row["assignment_id"] for row in found["assignments"]}
    assert len(found["traces"]) == MEMBERS * len(assigned)
    for row in found["traces"]:
        is_stale = row["group_id"] in stale
        assert (row["error_class"], row["reward"] is None) == (("stale", True) if is_stale else (None, False))


def check_replaced(found, *, keeps_examples):
    """As many groups are assigned as were stale, by the same step, with seeds of their own."""
    assigned = {row["group_id"]: row for row in found["assignments"]}
    for step in range(STEPS - 1):
        stale = sorted(row["example_id"] for row in found["stale_groups"] if row["step"] == step)
        new = sorted(row["example_id"] for name, row in assigned.items() if name.startswith(f"{step}.1000-"))
        assert len(new) == len(stale)
        assert new == stale or not keeps_examples
    assert len({row["seed"] for row in found["assignments"]}) == len(found["assignments"])

"""A real run that is killed while two rollouts wait for a tool between their turns; the next process goes on with them.

The first replies were sampled by the first policy. When the run is killed two others have been trained, and the engine
serves the newest when it goes on.
"""

import json

import pytest

from storage.turns import TurnCache
from tests.acceptance.lives import LivedRun
from tests.fixtures.driving import NAME, Driven, check_once, check_replayed, committed_groups, rows
from tests.fixtures.faults import happened
from tests.fixtures.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1500)]

STEPS, GROUPS, MEMBERS, BOUND = 4, 3, 2, 2
SETTINGS = (
    f"steps={STEPS}",
    'environments=[{name="straggling",taskset={id="straggling"},harness={id="chat_loop"},max_turns=2}]',
    f"assignment.groups_per_step={GROUPS}",
    f"assignment.group_size={MEMBERS}",
    f"rollout.max_off_policy_steps={BOUND}",
    "rollout.keep_turns=true",
    "rollout.max_tokens=8",
    "rollout.max_in_flight=24",
    "rollout.timeout_seconds=3000",
)


def kept(run):
    """The turns that the next process of the run would find, of groups that are not committed."""
    found, committed = TurnCache(run.store, NAME), committed_groups(run.store)
    return [turn for group in found._turns if group not in committed for turn in found.of(group)]


def killed_between_turns(run):
    """Kill the run when only the two that wait keep a step from its groups; return their turns."""
    process = run.begin({})

    def waits():
        assert process.poll() is None, run.log
        if not (run.root / "format.json").exists():
            return False
        trained = {entry.step for entry in run.store.ledger.entries(run=NAME, stage="training")}
        return trained == set(range(BOUND)) and len(kept(run)) == MEMBERS

    try:
        until(waits, lambda: f"{[turn.assignment_id for turn in kept(run)]}\n{run.log}")
    finally:
        process.kill()
        process.wait()
    happened(f"SIGKILL to {process.pid}, the flow")
    return kept(run)


@pytest.mark.fault(
    "services",
    "the flow is killed while rollouts are between two turns, and newer policies have been trained",
    "their first turns are not sampled again, and each token has its policy",
)
def test_turns_that_ended_before_a_crash_are_not_sampled_again(tmp_path):
    with LivedRun(tmp_path, *SETTINGS, plugins=True) as run:
        turns = killed_between_turns(run)
        run.live({}, NUM_STRAGGLERS="0")
    (group_id,) = {turn.group_id for turn in turns}
    check_once(run.root)
    found = rows(run.store)
    taken = {row["group_id"]: row for row in found["intakes"]}
    assert len(taken) == STEPS * GROUPS and taken[group_id]["step"] == BOUND == taken[group_id]["age"]
    versions = {row["policy_key"]: row["version"] for row in found["policies"]}
    for turn in turns:
        (trace,) = (row for row in found["traces"] if row["assignment_id"] == turn.assignment_id)
        first, second = (row for row in found["messages"] if row["trace_id"] == trace["trace_id"] and row["sampled"])
        (choice,) = json.loads(turn.answer)["choices"]
        assert [t for t, mask in zip(first["token_ids"], first["mask"], strict=True) if mask] == choice["token_ids"]
        assert [versions[key] for key in turn.policies] == [0] == [trace["policy_version"]]
        of_tokens = [row for row in found["token_policies"] if row["trace_id"] == trace["trace_id"]]
        assert [row["message"] for row in of_tokens] == [first["message"], second["message"]]
        before, after = (row["policy_version"] for row in of_tokens)
        assert before == 0 < after <= BOUND
    assert TurnCache(run.store, NAME)._turns == {}, "turns outlive the run"
    check_replayed(Driven(tmp_path, ()), STEPS)

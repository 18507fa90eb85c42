"""A real run that exchanges weights under its rollouts, whose engine and flow are killed in the middle of that.

Two processes share the work. The first loses its engine while that is paused, and is killed itself after a reload. The
second loses its engine before a reload, and before it goes on.
"""

import pytest

from tests.acceptance.lives import LivedRun
from tests.fixtures.driving import Driven, check_once, check_replayed, committed_rows, rows
from tests.fixtures.faults import happened

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]

STEPS, GROUPS, MEMBERS, BOUND = 10, 6, 4, 2
SETTINGS = (
    f"steps={STEPS}",
    f"rollout.max_off_policy_steps={BOUND}",
    'rollout.weight_update="keep"',
    "rollout.max_tokens=160",
    "engine.max_restarts=5",
)
# By the number of each request: the engine is brought to a policy when it was started, and then weights are exchanged.
FIRST = {"after exchange pause #2": "engine", "after exchange collective_rpc #3": "flow"}
SECOND = {"before exchange collective_rpc #2": "engine", "before exchange resume #4": "engine"}


@pytest.fixture(scope="module")
def survived(tmp_path_factory):
    """The run, and the policy of each group that was committed when the flow was killed."""
    with LivedRun(tmp_path_factory.mktemp("exchanged"), *SETTINGS) as run:
        run.live(FIRST, -9)
        safe = {row["group_id"]: row["policy_key"] for row in committed_rows(run.store, "intakes")}
        run.live(SECOND)
        yield run, safe


@pytest.mark.fault(
    "services",
    "engine and flow are killed while weights are exchanged under rollouts",
    "every rollout once, and every token with its policy",
)
def test_every_rollout_is_there_once_and_its_tokens_know_their_policies(survived):
    run, safe = survived
    moments = [receipt["moment"] for receipt in run.receipts]
    assert moments == [*FIRST, *SECOND]
    happened(", ".join(moments))
    check_once(run.root)
    found = rows(run.store)
    taken = {row["group_id"]: row for row in found["intakes"]}
    assert sorted(taken) == sorted(f"{step}-{slot}" for step in range(STEPS) for slot in range(GROUPS))
    assert {group: taken[group]["policy_key"] for group in safe} == safe and safe
    assert all(0 <= row["age"] <= BOUND for row in taken.values())
    assert len(found["traces"]) == STEPS * GROUPS * MEMBERS
    assert [row for row in found["traces"] if row["error_class"]] == [], "a loss was put down to a rollout"
    check_runs(found)


def check_runs(found):
    """Each sampled token of a rollout of several policies has one, within the bound and not younger than its step."""
    versions = {row["policy_key"]: row["version"] for row in found["policies"]}
    runs = {}
    for run in found["token_policies"]:
        runs.setdefault(run["trace_id"], []).append(run)
        assert run["policy_version"] == versions[run["policy_key"]]
        assert run["step"] - BOUND <= run["policy_version"] <= run["step"]
    assert runs, "no rollout has tokens of several policies"
    traces = {row["trace_id"]: row for row in found["traces"]}
    for trace_id, own in runs.items():
        assert sum(run["num_tokens"] for run in own) == traces[trace_id]["num_output_tokens"]
        assert traces[trace_id]["policy_version"] == min(run["policy_version"] for run in own)


def test_its_replay_makes_the_same_weights(survived):
    check_replayed(Driven(survived[0].directory, ()), STEPS)

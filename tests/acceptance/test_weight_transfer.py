"""A real run whose policies go from memory to memory; flow, engine and learner are killed on the way of them."""

import pytest

from tests.acceptance.lives import LivedRun
from tests.fixtures.driving import Driven, check_once, check_replayed, committed_groups, rows
from tests.fixtures.faults import happened

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]
STEPS, GROUPS, MEMBERS = 7, 6, 4
SETTINGS = (f"steps={STEPS}", "engine.weight_transfer=gloo", "engine.max_restarts=5")
# Each process makes a step before the first transfer of its own: until then the learner does not hold the policy.
FLOW = [
    "before exchange start_weight_update",
    "after exchange start_weight_update",
    "after exchange update_weights",
    "after exchange finish_weight_update",
    "after exchange weights_sum #2",
]
LAST = {"after exchange start_weight_update": "learner", "before exchange finish_weight_update #2": "engine"}


@pytest.mark.fault(
    "services", "flow, learner and engine are killed in a transfer", "every rollout once, the same weights"
)
def test_a_run_comes_to_its_end_with_the_weights_and_rollouts_of_one_that_nobody_killed(tmp_path):
    with LivedRun(tmp_path, *SETTINGS) as run:
        for moment in FLOW:
            run.live({moment: "flow"}, -9)
            committed = committed_groups(run.store)
        run.live(LAST)
        moments = [receipt["moment"] for receipt in run.receipts]
        assert moments == [*FLOW, *LAST]
        happened(", ".join(moments))
        check_once(run.root)
        found = rows(run.store)
        assert committed < {row["group_id"] for row in found["traces"]}
        assert len(found["traces"]) == STEPS * GROUPS * MEMBERS
        assert [row for row in found["traces"] if row["error_class"]] == []
        # Log-probs of sampling and training differ by rounding alone: no token came from other weights.
        assert max(row["mismatch_kl_max"] for row in found["updates"]) < 1e-9
        check_replayed(Driven(run.directory, ()), STEPS)

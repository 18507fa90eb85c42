"""A real run whose engine stands still in the middle of rollouts, and at an exchange of weights."""

import pytest

from tests.acceptance.lives import LivedRun
from tests.fixtures.driving import check_once, rows
from tests.fixtures.faults import happened

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1200)]
# Shorter than the engine is left to hang: its rollouts would be timeouts, were that time counted.
SHORT = ("engine.hang_seconds=12", "rollout.timeout_seconds=8", "steps=2")


@pytest.mark.fault("services", "the engine stands still", "it is started again, and no rollout is an error for it")
@pytest.mark.parametrize(
    ("moment", "what"),
    [
        ("after commit rollout 0 part", "engine"),
        ("before exchange collective_rpc #2", "engine"),
        ("after commit rollout 0 part", "behind engine"),  # its server answers still
    ],
)
def test_an_engine_that_hangs_costs_no_rollout(tmp_path, moment, what):
    with LivedRun(tmp_path, *SHORT) as run:
        run.live({moment: f"stop {what}"})
    (receipt,) = run.receipts
    happened(f"SIGSTOP to the engine {receipt['moment']}")
    assert run.outcome["generations"]["engine"] == 2
    (loss,) = run.store.runs.lost_services("run")
    assert loss.message.startswith("engine: did not answer any more and was ended; restart 1 of 3")
    traces = rows(run.store)["traces"]
    assert len(traces) == len({row["assignment_id"] for row in traces}) == 2 * 6 * 4
    assert [row["error_message"] for row in traces if row["error_class"]] == []
    check_once(run.root)

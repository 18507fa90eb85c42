"""The lines that end a replay."""

import pytest

from configs.run import RunConfig
from flows.replays.loop import summary


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([{"NeedsRuntime": 2}, {"TaskError": 1, "NeedsRuntime": 3}], ["NeedsRuntime 5, TaskError 1"]),
        ([{}, {}], []),
    ],
)
def test_rollouts_that_could_not_be_scored_are_counted_by_error(counts, said):
    config = RunConfig.model_validate({"kind": "replay", "name": "again", "seed": 7, "replay": {"run": "first"}})
    steps = [{"update": None, "not_regraded": errors} for errors in counts]
    lines = summary({"steps": steps, "num_computed": 3, "num_found": 0}, config)
    expected = [f"without a score: {text}; the table regrades says why" for text in said]
    assert [line for line in lines if line.startswith("without a score")] == expected

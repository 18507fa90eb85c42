"""How evaluations are told: figures with intervals, differences in cells, and what there is none of."""

from flows.reporting.formats import (
    EVALUATION_HEADINGS,
    before_after,
    describe_scores,
    with_interval,
)

ROW = {
    **{"set": "hard", "versions": [0, 4], "environment": "sums", "figure": "avg", "num_examples": 6},
    **{"before": 0.25, "after": 0.5, "difference": 0.25, "interval": {"low": -0.125, "high": 0.625}},
}
NONE = {"before": None, "after": None, "difference": None, "interval": None, "num_examples": 0}


def test_a_difference_in_cells():
    told = dict(zip(EVALUATION_HEADINGS, before_after([ROW]).rows[0], strict=True))
    assert told == {
        **{"held-out": "hard/sums", "policies": "0 to 4", "figure": "avg", "before": "0.250", "after": "0.500"},
        **{"change": "+0.250", "95% interval": "[-0.125, +0.625]", "n": "6"},
    }
    assert before_after([ROW | NONE]).rows[0][3:7] == ["-"] * 4


def test_scores_with_their_intervals():
    interval = {"low": 0.1, "high": 0.9}
    passed = {"k": 1, "estimate": 0.5, "interval": interval}
    scores = {"average": 0.5, "interval": None, "pass_at": [passed], "errors": {"timeout": 1}, "num_attempts": 4}
    assert describe_scores(scores) == "avg 0.500, pass@1 0.500 [0.100, 0.900], 1 of 4 failed (timeout 1)"
    assert with_interval(None, scores) == "-"
    assert describe_scores(scores | {"average": None, "pass_at": []}) == "nothing was scored, 1 of 4 failed (timeout 1)"

"""Metrics of optimizer steps: exact values, and what is not finite stays so."""

import math

from tasks.metrics.updates import update_metrics


def updated(**changes):
    """A row of updates with every number 0."""
    counts = ("num_rows", "num_tokens", "rl_tokens", "ce_tokens", "ref_kl_tokens")
    return {**dict.fromkeys(counts, 0), "metrics": "{}", "policy_key_in": "k", **changes}


def test_several_updates_on_a_batch_have_a_mean_and_ends():
    rows = [updated(loss=loss, entropy=None, rl_tokens=2, ref_kl_tokens=1, num_tokens=5) for loss in (1.0, 4.0)]
    found = update_metrics(rows)
    assert (found["update/loss"], found["updates"]) == (4.0, 2.0), "the last one"
    assert [found[f"updates/loss/{end}"] for end in ("mean", "min", "max")] == [2.5, 1.0, 4.0]
    assert not {"update/entropy", "updates/entropy/mean", "update/policy_key_in"} & found.keys()
    assert found["updates/weighted_tokens"] == 4, "reference KL is of tokens that the rl component has"
    assert found["updates/num_tokens"] == 10 and update_metrics([]) == {}


def test_what_is_not_finite_stays_so_whatever_the_order():
    further = '{"not_finite": ["worst"], "clipped": true, "extra": 2}'
    for rows in ([updated(loss=math.nan), updated(loss=1.0)], [updated(loss=1.0), updated(loss=math.nan)]):
        found = update_metrics([*rows[:-1], rows[-1] | {"metrics": further}])
        assert all(math.isnan(found[f"updates/loss/{end}"]) for end in ("mean", "min", "max"))
        assert math.isnan(found["update/worst"]) and found["update/extra"] == 2

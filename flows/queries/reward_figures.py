"""What a tried reward comes to beside the recorded one: agreement, flips, signals of groups and advantages, in SQL."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from storage.read.views import select
from storage.roots import Root
from tasks.metrics.figures import rank_correlation

Z = 1.959964
"""Quantile of the normal distribution for intervals of 95 %."""
EQUAL = 1e-9
"""Rewards of a group that differ by less give no signal."""
MAX_LISTED = 5
_TOTALS = """
select count(*)::bigint as num_rollouts, count(score)::bigint as num_scored,
    (count(*) - count(score))::bigint as num_unscored, avg(recorded) as recorded_mean, avg(score) as score_mean,
    stddev_samp(recorded) as recorded_std, stddev_samp(score) as score_std
from tried
"""
_QUANTILES = """
select unnest([0, 0.25, 0.5, 0.75, 1]::double[]) as share,
    unnest(quantile_cont(recorded, [0, 0.25, 0.5, 0.75, 1])) as recorded,
    unnest(quantile_cont(score, [0, 0.25, 0.5, 0.75, 1])) as score
from tried where score is not null
"""
_BY_STEP = """
select run, step, min(policy_version)::bigint as policy, count(score)::bigint as num_scored, avg(recorded) as recorded,
    avg(score) as score,
    case when stddev_pop(recorded) * stddev_pop(score) > 0 then corr(recorded, score) end as correlation
from tried group by run, step order by run, step
"""
_PAIRS = """
select count(*) filter (where sign(a.recorded - b.recorded) * sign(a.score - b.score) > 0)::bigint as same_order,
    count(*) filter (where sign(a.recorded - b.recorded) * sign(a.score - b.score) < 0)::bigint as turned,
    count(*) filter (where a.recorded = b.recorded and a.score <> b.score)::bigint as newly_told_apart,
    count(*) filter (where a.recorded <> b.recorded and a.score = b.score)::bigint as no_longer_told_apart
from tried a join tried b on (a.run, a.step, a.group_id, a.agent) = (b.run, b.step, b.group_id, b.agent)
    and a.trace_id < b.trace_id
"""
_FLIPS = """
select run, step, trace_id, recorded, score, if(score >= bound, 'now right', 'now wrong') as flip
from tried, limits where score is not null and (recorded >= bound) <> (score >= bound)
order by abs(score - recorded) desc, run, step, trace_id
"""
_GROUPS = """
with spreads as (
    select run, step, group_id, max(recorded) - min(recorded) > equal as had, max(reward) - min(reward) > equal as has
    from tried, limits where reward is not null and recorded is not null group by run, step, group_id, agent, equal
)
select run, step, group_id, if(has, 'gains', 'loses') as signal from spreads where had <> has
order by run, step, group_id
"""
_ADVANTAGES = """
select count(*)::bigint as num_compared, avg(abs(advantage - advantage_before)) as mean_difference,
    case when stddev_pop(advantage_before) * stddev_pop(advantage) > 0 then corr(advantage_before, advantage) end
        as correlation,
    count(*) filter (where sign(advantage) * sign(advantage_before) < 0)::bigint as turned
from tried where advantage is not null and advantage_before is not null
"""


def try_figures(rows: pl.DataFrame, right: float) -> dict[str, Any]:
    """Return the figures of a try as plain values; `rows` are those of `try_reward`, `right` the least right reward.

    `agreement` has Spearman's rank correlation and Cohen's kappa of right and wrong (Cohen 1960), each with an interval
    of 95 % that takes rollouts as independent; `pairs` compares the rollouts of a group two by two; `flips` and
    `groups` are counted, with the first few listed; `errors` are counted by text.
    """
    limits = pl.DataFrame({"bound": [right], "equal": [EQUAL]})
    frames = {"tried": lambda: rows, "limits": lambda: limits}
    both = rows.drop_nulls(["recorded", "score"])
    flips, groups = select(frames, _FLIPS), select(frames, _GROUPS)
    by_step = select(frames, _BY_STEP)
    errors = (
        rows.drop_nulls("error").group_by("error").len("num_rollouts").sort(["num_rollouts", "error"], descending=True)
    )
    return {
        **select(frames, _TOTALS).to_dicts()[0],
        "distribution": select(frames, _QUANTILES).to_dicts(),
        "agreement": [
            _rank(both["recorded"], both["score"]),
            _kappa(both["recorded"] >= right, both["score"] >= right),
        ],
        "pairs": select(frames, _PAIRS).to_dicts()[0],
        "flips": {"num_flips": flips.height, "first": flips.head(MAX_LISTED).to_dicts()},
        "groups": {
            "gain_a_signal": groups.filter(signal="gains").height,
            "lose_their_signal": groups.filter(signal="loses").height,
            "first": groups.head(MAX_LISTED).to_dicts(),
        },
        "advantages": select(frames, _ADVANTAGES).to_dicts()[0],
        "by_step": by_step.to_dicts(),
        "errors": errors.head(MAX_LISTED).to_dicts(),
    }


def _rank(recorded: pl.Series, score: pl.Series) -> dict[str, Any]:
    """Spearman's rank correlation; the interval by Fisher's z with the variance of Bonett and Wright (2000)."""
    value = rank_correlation(recorded, score)
    interval: Sequence[float | None] = (None, None)
    if value is not None and len(score) > 3 and abs(value) < 1:
        reach = Z * math.sqrt((1 + value**2 / 2) / (len(score) - 3))
        interval = [math.tanh(math.atanh(value) + sign * reach) for sign in (-1, 1)]
    return _figure("rank correlation", value, interval)


def _kappa(first: pl.Series, second: pl.Series) -> dict[str, Any]:
    """Cohen's kappa; the interval by the large-sample error of Cohen (1960)."""
    count = len(first)
    if not count:
        return _figure("kappa", None, (None, None))
    agreed = int((first == second).sum()) / count
    shares = int(first.sum()) / count, int(second.sum()) / count
    chance = shares[0] * shares[1] + (1 - shares[0]) * (1 - shares[1])
    if chance == 1:
        return _figure("kappa", None, (None, None))
    value = (agreed - chance) / (1 - chance)
    reach = Z * math.sqrt(agreed * (1 - agreed) / count) / (1 - chance)
    return _figure("kappa", value, (max(-1.0, value - reach), min(1.0, value + reach)))


def _figure(name: str, value: float | None, interval: Sequence[float | None]) -> dict[str, Any]:
    return {"figure": name, "value": value, "low": interval[0], "high": interval[1]}


def keep_figures(root: Root, run: str, name: str, figures: dict[str, Any]) -> None:
    """Write the figures of a try beside the logs of a run, in place of an earlier one of that name.

    Nothing is written for a store that is no directory of this machine.
    """
    if root.directory:
        file = _tries(root, run) / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(figures), encoding="utf-8")
        draft.replace(file)


def kept_figures(root: Root, run: str) -> dict[str, dict[str, Any]]:
    """Return the figures of the tries of a run by name; see `keep_figures`."""
    files = sorted(_tries(root, run).glob("*.json")) if root.directory else ()
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def _tries(root: Root, run: str) -> Path:
    return Path(root.directory or "", "logs", run, "rewards")

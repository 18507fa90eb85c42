"""Races of a sweep: who has lost, by hand, by chance and as recorded, and the run that is ended."""

import random
from itertools import permutations
from statistics import fmean

import pyarrow as pa
import pytest

from flows.cli import race
from flows.cli.arguments import UsageError
from flows.cli.race import is_worse, race_level, races
from tasks.evaluation.confidence import LEVEL
from tasks.evaluation.stage import paired_differences
from tests.fixtures import evaluations

ARMS, LOOKS, EXAMPLES = 3, 4, 24


def traces(rewards):
    """Rollouts, one of each example in turn."""
    columns = {"environment": "e", "trainable": True, "error_class": None}
    rows = [{"example_id": str(n % EXAMPLES), "reward": reward, **columns} for n, reward in enumerate(rewards)]
    return pa.Table.from_pylist(rows)


def loses(run, rival, level):
    return is_worse(paired_differences(rival, run, (), level=level))


def test_a_run_is_worse_where_the_interval_of_its_differences_is_below_zero():
    # Differences of -0.3 and 0.1 in turn: the mean is -0.1, s / sqrt(10) is 0.2108 / 3.1623 = 0.0667. By the tables
    # t is 1.833 for a level of 0.9 and 1.383 for 0.8: the upper ends are 0.0222 and -0.0078.
    run, rival = traces([0.7, 1.1] * 5), traces([1.0] * 10)
    (change,) = paired_differences(rival, run, (), level=0.9)
    assert (change.interval.low, change.interval.high) == pytest.approx((-0.2222, 0.0222), abs=5e-4)
    assert not loses(run, rival, 0.9)
    assert loses(run, rival, 0.8) and not loses(rival, run, 0.8)
    assert not loses(run.slice(0, 7), rival, 0.5), "of few examples"


def test_paired_intervals_hold_the_true_difference_in_about_nineteen_of_twenty_evaluations():
    # 300 trials of 0.95 have a standard deviation of 0.013; the seed is fixed.
    chance, held = random.Random(5), []
    for _ in range(300):
        hard = [chance.uniform(0.2, 1) for _ in range(EXAMPLES)] * 2
        run, rival = (traces([float(chance.random() < p - gap) for p in hard]) for gap in (0.2, 0))
        (change,) = paired_differences(rival, run, ())
        held.append(change.interval.low <= -0.2 <= change.interval.high)
    assert 0.925 <= fmean(held) <= 0.98


def share_of_races(level, num_races, gap=0.0):
    """Return the share of simulated races in which a run is ended; the last passes less often than the others."""
    chance, ended = random.Random(3), 0
    for _ in range(num_races):
        losers = 0
        for _ in range(LOOKS):
            hard = [chance.uniform(gap, 1) for _ in range(EXAMPLES)] * 2
            rewards = [[float(chance.random() < p - gap * (arm == 0)) for p in hard] for arm in range(ARMS)]
            losers += sum(loses(*pair, level) for pair in permutations(map(traces, rewards), 2))
        ended += bool(losers)
    return ended / num_races


def test_equal_runs_are_ended_in_at_most_one_of_twenty_races():
    # The seed is fixed: 200 races of 0.05 have a standard deviation of 0.015.
    level = race_level(ARMS, LOOKS)
    assert level == pytest.approx(1 - 0.05 / 12)
    assert share_of_races(level, 200) <= 0.05 < 0.25 < share_of_races(LEVEL, 50)
    assert share_of_races(level, 30, gap=0.4) == 1


class Worse(evaluations.Sampler):
    """Earns half of what the other sampler earns."""

    def _trace(self, row, policy):
        trace = super()._trace(row, policy)
        return trace | {"reward": trace["reward"] / 2}


def test_the_run_that_is_worse_is_cancelled_in_prefect_before_its_end(tmp_path, monkeypatch):
    calls, settings = [], {"evaluation": {"every": 1, "num_examples": 10}}
    monkeypatch.setattr(evaluations, "HELD_OUT", 10)
    monkeypatch.setattr(race, "current_flow_run", lambda: "flow run")
    monkeypatch.setattr(race, "request_cancellation", lambda *request: calls.append(request))
    good = evaluations.train(tmp_path / "store", "good", evaluations.Sampler(), **settings)[0].config
    in_race = races([good, good.model_copy(update={"name": "bad"})])
    assert in_race["good"].level == race_level(2, 3) and in_race["bad"].loss() == "", "it has not begun"
    evaluations.train(tmp_path / "store", "bad", Worse(), training={"learning_rate": 1e-3}, **settings)
    in_race["good"].watch(2, "evaluation", {"version": 1})
    in_race["bad"].watch(2, "evaluation", {"version": 2})
    assert calls == []
    in_race["bad"].watch(2, "evaluation", {"version": 1})
    assert calls == [("flow run", "policy 2 is worse than that of good on held-out examples")]
    with pytest.raises(UsageError, match="several combinations"):
        races([good])

"""Evaluation: what a policy earns on held-out examples, by environment.

Every rollout counts by itself and none is left out in silence: errors are counted by class, and each figure is given
twice, over the attempts that were scored and with errors as failures (the floor).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, inf
from statistics import fmean
from typing import Any

import pyarrow as pa

from configs.evaluation import passes
from tasks.evaluation.confidence import LEVEL, Interval, of_mean, students

UNSCORED = "unscored"
"""What attempts without an error and without a reward are counted as."""
OF_ATTEMPTS = ("environment", "example_id", "trainable", "reward", "error_class")
"""The columns of traces that say how attempts went."""
OF_COSTS = ("num_turns", "num_input_tokens", "num_output_tokens")
"""The columns of traces that say what all who took part did."""
COLUMNS = ("assignment_id", "agent", *OF_ATTEMPTS, *OF_COSTS)
"""The columns of traces that an evaluation is read from."""


@dataclass(frozen=True)
class PassAt:
    """pass@k of one environment."""

    k: int
    estimate: float | None
    """Mean over the examples with at least k scored attempts; None if there is none."""
    num_examples: int
    """How many examples that is."""
    floor: float | None
    """The same with errors as failures, over the examples with at least k attempts of any kind; None if none."""
    interval: Interval | None = None
    """Confidence interval of `estimate`, over examples; None where nothing can be said."""


@dataclass(frozen=True)
class Estimate:
    """What one environment's evaluation measured."""

    environment: str
    num_examples: int
    num_attempts: int
    errors: Mapping[str, int]
    """Attempts by error class; those without an error or a reward under `unscored`."""
    average: float | None
    """avg@k: mean over examples of the mean reward of their scored attempts; None if nothing was scored."""
    average_floor: float | None
    """The same with a reward of zero for errors, over all examples; below `average` for rewards above zero."""
    pass_at: tuple[PassAt, ...]
    interval: Interval | None = None
    """Confidence interval of `average`, over examples; None where nothing can be said."""
    num_turns: int = 0
    """Model turns of all who took part, frozen seats included."""
    num_tokens: int = 0
    """Tokens fed in and sampled by all who took part; as the provider counts them where it shows no tokens."""


Rewards = Mapping[str, Sequence[float | None]]
"""By example the rewards of its attempts, None where one was not scored."""


def pass_at_k(num_attempts: int, num_passes: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k attempts passes: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1. Raises ValueError unless
    0 <= num_passes <= num_attempts and 1 <= k <= num_attempts.
    """
    if not 0 <= num_passes <= num_attempts or not 1 <= k <= num_attempts:
        raise ValueError(
            f"pass@{k} of {num_passes} passes in {num_attempts} attempts does not exist: k is at least 1 and, like the "
            "passes, at most the attempts. Lower evaluation.pass_at or raise evaluation.attempts."
        )
    return 1.0 - comb(num_attempts - num_passes, k) / comb(num_attempts, k)


def estimates(
    traces: pa.Table, pass_at: Sequence[int] = (1,), pass_reward: float = 1.0, took_part: pa.Table | None = None
) -> list[Estimate]:
    """Return one estimate per environment, in order of name, from its trainable traces.

    An attempt passes when its reward is at least `pass_reward`, see `configs.evaluation.passes`. Traces of seats that
    the policy does not hold are no attempts of it and are left out. `took_part` are the traces of all seats whose turns
    and tokens are counted, where `traces` are not all.
    """
    rewards, errors = rewards_of(traces), _errors(traces)
    costs = _costs(traces if took_part is None else took_part)
    return [
        _estimate(name, rewards[name], errors[name], pass_at, pass_reward, costs.get(name, (0, 0)))
        for name in sorted(rewards)
    ]


def rewards_of(traces: pa.Table) -> dict[str, dict[str, list[float | None]]]:
    """Return the rewards of the policy's attempts, by environment and example."""
    found: dict[str, dict[str, list[float | None]]] = defaultdict(lambda: defaultdict(list))
    for row in _attempts(traces):
        found[row["environment"]][row["example_id"]].append(row["reward"] if _has_score(row) else None)
    return found


def example_means(rewards: Rewards) -> dict[str, float]:
    """Return the mean reward of each example's scored attempts; examples of which none was scored are left out."""
    return {example: mean for example, values in rewards.items() if (mean := _mean(values)) is not None}


def example_passes(rewards: Rewards, k: int, pass_reward: float = 1.0) -> dict[str, float]:
    """Return pass@k of each example; those with fewer than k scored attempts are left out."""
    found = {}
    for example, values in rewards.items():
        scored = [value for value in values if value is not None]
        if len(scored) >= k:
            found[example] = pass_at_k(len(scored), sum(passes(value, pass_reward) for value in scored), k)
    return found


def _attempts(traces: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = traces.select(list(OF_ATTEMPTS)).to_pylist()
    return [row for row in rows if row["trainable"]]


def _has_score(row: Mapping[str, object]) -> bool:
    return row["error_class"] is None and row["reward"] is not None


def _errors(traces: pa.Table) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for row in _attempts(traces):
        if not _has_score(row):
            found[str(row["environment"])][str(row["error_class"] or UNSCORED)] += 1
    return found


def _costs(traces: pa.Table) -> dict[str, tuple[int, int]]:
    """Return turns and tokens of all who took part, by environment."""
    found = traces.select(["environment", *OF_COSTS]).group_by("environment")
    rows = found.aggregate([(name, "sum") for name in OF_COSTS]).to_pylist()
    tokens = {row["environment"]: row["num_input_tokens_sum"] + row["num_output_tokens_sum"] for row in rows}
    return {row["environment"]: (row["num_turns_sum"], tokens[row["environment"]]) for row in rows}


def _estimate(
    environment: str,
    rewards: Rewards,
    errors: Counter[str],
    pass_at: Sequence[int],
    pass_reward: float,
    costs: tuple[int, int],
) -> Estimate:
    means = list(example_means(rewards).values())
    floors = example_means(_with_floor(rewards)).values()
    return Estimate(
        environment=environment,
        num_examples=len(rewards),
        num_attempts=sum(map(len, rewards.values())),
        errors=dict(sorted(errors.items())),
        average=_mean(means),
        average_floor=_mean(list(floors)),
        pass_at=tuple(_pass_at(k, rewards, pass_reward) for k in pass_at),
        interval=of_mean(means, [each for own in rewards.values() for each in own if each is not None]),
        num_turns=costs[0],
        num_tokens=costs[1],
    )


def _pass_at(k: int, rewards: Rewards, pass_reward: float) -> PassAt:
    shares = list(example_passes(rewards, k, pass_reward).values())
    # As failures, errors count with a reward that never passes, whatever the threshold is.
    floors = list(example_passes(_with_floor(rewards, -inf), k, pass_reward).values())
    return PassAt(k, _mean(shares), len(shares), _mean(floors), of_mean(shares))


def _with_floor(rewards: Rewards, failure: float = 0.0) -> Rewards:
    return {example: [failure if value is None else value for value in own] for example, own in rewards.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of what is there; None if nothing is."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


@dataclass(frozen=True)
class Difference:
    """One figure before and after, over the examples that both have it for."""

    environment: str
    figure: str
    """avg, or pass@k."""
    before: float | None
    after: float | None
    difference: float | None
    """after - before; None where no example has both."""
    interval: Interval | None
    """Confidence interval of `difference`; None where it is the same on all examples, or there are fewer than two."""
    num_examples: int


def paired_differences(
    before: pa.Table,
    after: pa.Table,
    pass_at: Sequence[int] = (1,),
    pass_reward: float = 1.0,
    level: float = LEVEL,
) -> list[Difference]:
    """Return how the figures of each environment that both tables of traces have differ, in order of name.

    Intervals of `level` are those of the paired t-test over examples: d -+ t s / sqrt(n), d and s being mean and
    standard deviation of the n differences after - before of an example.
    """
    one, other = rewards_of(before), rewards_of(after)
    found = []
    for name in sorted(one.keys() & other.keys()):
        found.append(_difference(name, "avg", example_means(one[name]), example_means(other[name]), level))
        for k in pass_at:
            before_passes, after_passes = (example_passes(each[name], k, pass_reward) for each in (one, other))
            found.append(_difference(name, f"pass@{k}", before_passes, after_passes, level))
    return found


def _difference(
    environment: str, figure: str, one: Mapping[str, float], other: Mapping[str, float], level: float
) -> Difference:
    both = sorted(one.keys() & other.keys())
    if not both:
        return Difference(environment, figure, None, None, None, None, 0)
    before, after = fmean(one[each] for each in both), fmean(other[each] for each in both)
    steps = [other[each] - one[each] for each in both]
    return Difference(environment, figure, before, after, after - before, students(steps, level), len(both))

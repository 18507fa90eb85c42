"""Evaluation: what a policy earns on held-out examples, by environment.

Every rollout counts by itself and none is left out in silence: errors are counted by class, and each figure is given
twice, over the attempts that were scored and with errors as failures (the floor).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

import pyarrow as pa

UNSCORED = "unscored"
"""What attempts without an error and without a reward are counted as."""


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


def estimates(traces: pa.Table, pass_at: Sequence[int] = (1,), pass_reward: float = 1.0) -> list[Estimate]:
    """Return one estimate per environment, in order of name, from its trainable traces.

    An attempt passes when its reward is at least `pass_reward`. Traces of seats that the policy does not hold are no
    attempts of it and are left out.
    """
    columns = ["environment", "example_id", "trainable", "reward", "error_class"]
    attempts: dict[str, dict[str, list[float | None]]] = defaultdict(lambda: defaultdict(list))
    errors: dict[str, Counter[str]] = defaultdict(Counter)
    for row in traces.select(columns).to_pylist():
        if not row["trainable"]:
            continue
        scored = row["error_class"] is None and row["reward"] is not None
        attempts[row["environment"]][row["example_id"]].append(row["reward"] if scored else None)
        if not scored:
            errors[row["environment"]][row["error_class"] or UNSCORED] += 1
    return [
        _estimate(environment, list(attempts[environment].values()), errors[environment], pass_at, pass_reward)
        for environment in sorted(attempts)
    ]


Rewards = Sequence[Sequence[float | None]]
"""Per example the rewards of its attempts, None where one was not scored."""


def _estimate(
    environment: str, rewards: Rewards, errors: Counter[str], pass_at: Sequence[int], pass_reward: float
) -> Estimate:
    scored = [[reward for reward in example if reward is not None] for example in rewards]
    floored = [[0.0 if reward is None else reward for reward in example] for example in rewards]
    return Estimate(
        environment=environment,
        num_examples=len(rewards),
        num_attempts=sum(map(len, rewards)),
        errors=dict(sorted(errors.items())),
        average=_mean([_mean(example) for example in scored]),
        average_floor=_mean([_mean(example) for example in floored]),
        pass_at=tuple(_pass_at(k, rewards, pass_reward) for k in pass_at),
    )


def _pass_at(k: int, rewards: Rewards, pass_reward: float) -> PassAt:
    scored, floored = [], []
    for example in rewards:
        num_scored = sum(reward is not None for reward in example)
        passes = sum(reward is not None and reward >= pass_reward for reward in example)
        if num_scored >= k:
            scored.append(pass_at_k(num_scored, passes, k))
        if len(example) >= k:
            floored.append(pass_at_k(len(example), passes, k))
    return PassAt(k, _mean(scored), len(scored), _mean(floored))


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of what is there; None if nothing is."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None

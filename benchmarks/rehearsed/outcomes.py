"""Outcomes of made-up rollouts: which course each takes, what it earns, and what goes wrong with it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.rehearsed.shapes import ENDINGS, TEXT_ENVIRONMENT, Ending, Shape, broken, chat, tools

HORIZON = 60.0
"""Versions after which most of what can be learnt is learnt."""


@dataclass(frozen=True)
class Outcome:
    """How one rollout goes."""

    shape: Shape
    rewards: Mapping[str, tuple[float, float]]
    """Score and weight of every named reward; none where it failed."""
    ending: Ending | None = None
    truncated: bool = False
    loops: bool = False
    gibberish: bool = False
    unreadable: bool = False

    @property
    def reward(self) -> float | None:
        """The weighted sum; None where there was nothing to score."""
        return sum(score * weight for score, weight in self.rewards.values()) if self.rewards else None


def skill(version: int) -> float:
    """Return how good the policy of a version is, from 0.25 towards 0.8."""
    return 0.25 + 0.55 * (1.0 - float(np.exp(-version / HORIZON)))


def difficulty(environment: str, example_id: str) -> float:
    """Return how hard an example is, from 0 to 1: by its name, for ever."""
    return hashlib.sha256(f"{environment}/{example_id}".encode()).digest()[0] / 255


def outcomes(rows: Sequence[Mapping[str, Any]], version: int, chance: np.random.Generator) -> list[Outcome]:
    """Return how rollouts go, by assignment, with the policy of a version."""
    draws = chance.random((len(rows), 4))
    chances = [
        1 / (1 + np.exp(-9 * (skill(version) - difficulty(row["environment"], row["example_id"])))) for row in rows
    ]
    return [
        _outcome(row["environment"], float(success), *(float(each) for each in draw))
        for row, success, draw in zip(rows, chances, draws, strict=True)
    ]


def _outcome(environment: str, success: float, luck: float, course: float, quality: float, mishap: float) -> Outcome:
    """Return one outcome out of four numbers between 0 and 1."""
    if environment == TEXT_ENVIRONMENT:
        shape = chat(1 if course < 0.7 else 2)
        score = round(20 * min(max(success + 0.5 * (quality - 0.5), 0.0), 1.0)) / 20
        rewards = {"overlap": (score, 0.8), "length": (float(luck < 0.9), 0.2)}
    else:
        shape = tools(1 if course < 0.5 else 2, again=course > 0.95)
        rewards = {"answer": (float(luck < success), 0.9), "form": (float(luck < 0.5 + success / 2), 0.1)}
    if mishap < 0.04:
        ending = ENDINGS[int(mishap / 0.01) % len(ENDINGS)]
        return Outcome(broken(shape, 0 if luck < 0.4 else min(2, len(shape.roles))), {}, ending)
    return Outcome(
        shape,
        rewards,
        truncated=0.04 <= mishap < 0.07,
        loops=0.07 <= mishap < 0.08,
        gibberish=0.08 <= mishap < 0.09,
        unreadable=0.09 <= mishap < 0.10,
    )

"""What judges said of a step's rollouts, in numbers, and what that cost."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

SUMS = ("input_tokens", "output_tokens", "cost", "seconds")


def judge_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return, by judge, the mean score, the share without one, and what the answers of this step came to.

    `calls` are the answers that were paid for in this step; the sums are theirs.
    """
    by_judge: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_judge[row["judge"]].append(row)
    values: dict[str, float] = {}
    for judge, own in sorted(by_judge.items()):
        scores, paid = [row["score"] for row in own if row["score"] is not None], [row for row in own if row["asked"]]
        measures = {"rollouts": float(len(own)), "unscored": 1 - len(scores) / len(own), "calls": float(len(paid))}
        measures |= {"score/mean": fmean(scores)} if scores else {}
        measures |= {name: float(sum(row[name] for row in paid)) for name in SUMS}
        values |= {f"judge/{judge}/{name}": value for name, value in measures.items()}
    return values

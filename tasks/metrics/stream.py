"""Metrics of a step that took its rollouts from a stream: how full the engine was, who waited, how old tokens are.

They are of the time in which the step's groups ended: `seconds` of each row of table intake_loads, added up. An age is
reported only of tokens that may be trained on: those that the policy sampled in rollouts that the filters kept.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.arrays.columns import rows_with
from tasks.metrics.rollouts import ages_of_tokens, mean_and_max
from tasks.runtime.stage import Tables

SHARES = {"engine_idle": "idle_seconds", "learner_waited": "learner_waited_seconds"}
Row = Mapping[str, Any]


def stream_metrics(tables: Tables) -> dict[str, float]:
    """Return the metrics of a step's intake, `stream/...`; none where it took no rollouts from a stream."""
    if "intakes" not in tables:
        return {}
    loads = tables["intake_loads"].to_pylist() if "intake_loads" in tables else []
    found = load_metrics(loads) | token_ages(tables)
    if "stale_groups" in tables:
        stale, taken = tables["stale_groups"].num_rows, tables["intakes"].num_rows
        found["stale"] = stale / (stale + taken)
    return {f"stream/{name}": value for name, value in found.items()}


def load_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Return how full the engine was, who waited, and what was cancelled; none of rows that have no measured seconds.

    `fullness` is `in_flight` as a share of what `rollout.max_in_flight` allowed.
    """
    measured = [row for row in rows if row["seconds"]]
    if not measured:
        return {}
    seconds = math.fsum(row["seconds"] for row in measured)
    found = {"seconds": seconds}
    found |= {name: math.fsum(row[column] for row in measured) / seconds for name, column in SHARES.items()}
    found["in_flight"] = _mean_over_time(measured, "in_flight")
    cancelled, ended = (sum(row[name] for row in rows) for name in ("num_cancelled", "num_ended"))
    if cancelled + ended:
        found["cancelled"] = cancelled / (cancelled + ended)
    return found | {"fullness": found["in_flight"] / _mean_over_time(measured, "max_in_flight")}


def token_ages(tables: Tables) -> dict[str, float]:
    """Return the mean and greatest age of tokens, in steps, and which share of them has which age."""
    if "verdicts" not in tables:
        return {}
    kept = tables["verdicts"].filter(tables["verdicts"]["keep"])["trace_id"]
    traces = rows_with(tables["traces"].filter(tables["traces"]["trainable"]), "trace_id", kept)
    rows = traces.select(["trace_id", "policy_version", "staleness", "num_output_tokens"]).to_pylist()
    ages = ages_of_tokens(rows, tables.get("token_policies"))
    found = {f"token_age/{name}": value for name, value in mean_and_max(ages)}
    return found | {f"tokens_of_age/{age}": count / ages.total() for age, count in sorted(ages.items())}


def _mean_over_time(rows: Sequence[Row], name: str) -> float:
    """Return the mean of a column over time."""
    return math.fsum(row["seconds"] * row[name] for row in rows) / math.fsum(row["seconds"] for row in rows)

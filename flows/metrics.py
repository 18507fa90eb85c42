"""The metrics of one step, as plain numbers out of its tables.

Every metric of rollouts exists for all of them, in the scope `all`, and by environment: `reward/all/mean`,
`reward/reverse-text/mean`. Means are over all rollouts, also those that the filters leave out of training; a rollout
that was not scored is in no mean of rewards, for that is not a reward of zero. Those that were stopped because enough
others had ended (oversampling) have a share of their own, `stragglers/all`, and are in no other number. Where several
agents of an environment were scored, each has a mean of its own, `reward/debate/affirmative/mean`: that of all of them
is 0 in every game in which one wins what the other loses.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from tasks.inference.sampling.failures import STRAGGLER

_TRACE_COLUMNS = (
    "trace_id",
    "environment",
    "agent",
    "trainable",
    "staleness",
    "reward",
    "metrics",
    "is_truncated",
    "num_turns",
    "num_branches",
    "num_input_tokens",
    "num_output_tokens",
    "error_class",
    "setup_seconds",
    "generation_seconds",
    "model_seconds",
    "scoring_seconds",
)
_MEANS = ("num_turns", "num_input_tokens", "num_output_tokens", "is_truncated", "staleness")
_SPANS = ("setup", "generation", "model", "scoring")
_NOT_NUMBERS = ("policy_key_in", "weights_sha256_in", "weights_sha256", "metrics")


def step_metrics(
    traces: pa.Table,
    verdicts: pa.Table,
    update: Mapping[str, Any] | None,
    accounting: Mapping[str, int],
    seconds: Mapping[str, float],
    filters: Sequence[str] = (),
    retokenised: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """Return the metrics of one step by name.

    `update` is the step's row of `updates` (None where nothing was trained), `accounting` what became of the assigned
    rollouts, `seconds` the wall-clock by stage. `filters` names those configured, so that one that found nothing is
    there as zero, `retokenised` how many turns of which trace were tokenised again (None where nobody counted). What a
    step did not measure has no entry; values may be NaN or infinite, see `finite`.
    """
    verdict = {row["trace_id"]: row for row in verdicts.to_pylist()}
    rows = [row | {"verdict": verdict.get(row["trace_id"])} for row in traces.select(_TRACE_COLUMNS).to_pylist()]
    names = sorted({*filters, *(name for row in verdict.values() for name in row["detected"])})
    metrics: dict[str, float] = {}
    scopes = {"all": rows} | {
        environment: [row for row in rows if row["environment"] == environment]
        for environment in sorted({row["environment"] for row in rows})
    }
    for scope, members in scopes.items():
        metrics |= _stragglers(scope, members)
        ended = [row for row in members if row["error_class"] != STRAGGLER]
        metrics |= _rollout_metrics(scope, ended) | _filter_metrics(scope, ended, names)
        if scope != "all":
            metrics |= _agents_rewards(scope, ended)
        if retokenised is not None:
            again = sum(retokenised.get(row["trace_id"], 0) for row in ended)
            metrics[f"rollout/{scope}/retokenised_turns"] = float(again)
    metrics |= update_metrics(update or {})
    metrics |= {f"accounting/{name}": float(count) for name, count in accounting.items()}
    metrics |= {f"timing/stage/{stage}": float(value) for stage, value in seconds.items()}
    return metrics


def finite(metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Return the metrics that are finite numbers, and the names of the others."""
    kept = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return kept, [name for name in metrics if name not in kept]


def _stragglers(scope: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of rollouts that were stopped; nothing where none was."""
    stopped = sum(row["error_class"] == STRAGGLER for row in rows)
    return {f"stragglers/{scope}": stopped / len(rows)} if stopped else {}


def _rollout_metrics(scope: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return reward, lengths, errors and time of one scope's rollouts."""
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    errors = Counter(row["error_class"] for row in rows if row["error_class"] is not None)
    metrics = {f"rollouts/{scope}": float(len(rows))}
    if rewards:
        average = mean(rewards)
        metrics |= {
            f"reward/{scope}/mean": average,
            f"reward/{scope}/std": math.sqrt(mean((reward - average) ** 2 for reward in rewards)),
            f"reward/{scope}/min": float(min(rewards)),
            f"reward/{scope}/max": float(max(rewards)),
        }
    if not rows:
        return metrics
    metrics |= {f"{name}/{scope}": mean(row[name] for row in rows) for name in _MEANS}
    metrics[f"samples_per_rollout/{scope}"] = mean(row["num_branches"] for row in rows)
    metrics |= {f"timing/{scope}/{span}": mean(row[f"{span}_seconds"] for row in rows) for span in _SPANS}
    metrics[f"errored_rollout/{scope}"] = errors.total() / len(rows)
    metrics |= {f"errored_rollout/{scope}/{kind}": count / len(rows) for kind, count in sorted(errors.items())}
    return metrics | _named_metrics(scope, rows)


def _agents_rewards(environment: str, rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean reward of each agent of an environment; nothing where there is only one."""
    rewards: dict[str, list[float]] = {}
    for row in rows:
        if row["reward"] is not None:
            rewards.setdefault(row["agent"], []).append(row["reward"])
    several = sorted(rewards.items()) if len(rewards) > 1 else []
    return {f"reward/{environment}/{agent}/mean": mean(own) for agent, own in several}


def _named_metrics(scope: str, rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means of what the environment measured, each over the rollouts that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in json.loads(row["metrics"] or "{}").items():
            if isinstance(value, (int, float)):
                values.setdefault(name, []).append(float(value))
    return {f"metrics/{scope}/{name}": mean(found) for name, found in sorted(values.items())}


def _filter_metrics(scope: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, float]:
    """Return the share of rollouts that each filter found, that any filtered, and that are left to train on."""
    judged = [row for row in rows if row["verdict"] is not None]
    if not judged:
        return {}
    trainable = sum(row["verdict"]["keep"] and row["trainable"] for row in judged)
    return {
        **{f"filters/{scope}/{name}": mean(name in row["verdict"]["detected"] for row in judged) for name in names},
        f"filters/{scope}/is_filtered": mean(not row["verdict"]["keep"] for row in judged),
        f"trainable/{scope}/count": float(trainable),
        f"trainable/{scope}/ratio": trainable / len(judged),
    }


def update_metrics(update: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an optimizer step, further metrics of the learner included.

    Those that were not finite are null in the JSON, which has no form for them, and NaN here.
    """
    further = json.loads(update.get("metrics") or "{}")
    further |= dict.fromkeys(further.pop("not_finite", ()), math.nan)
    values = {name: value for name, value in update.items() if name not in _NOT_NUMBERS} | further
    return {f"update/{name}": float(value) for name, value in values.items() if isinstance(value, (int, float))}


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean of numbers or flags; there must be one."""
    found = [float(value) for value in values]
    return math.fsum(found) / len(found) if all(map(math.isfinite, found)) else sum(found) / len(found)

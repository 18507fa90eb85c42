"""What a figure of a run is called in W&B and TensorBoard: as prime-rl and TRL name it, where they have it.

Figures are those of the table `metrics`, by scope and measure, and of the ledger beside it. Each quantity has one name.
A figure that no table here knows keeps the name that it has in the store (`tasks.metrics.figures.full_name`).
"""

from collections.abc import Mapping
from typing import Any

from flows.reporting.formats import environment_title
from tasks.metrics.figures import ALL, Values, full_name
from tasks.metrics.updates import SPREAD

Figures = dict[str, float]

NAMES = {
    **{f"updates/{name}/{of}": f"{name}/{of}" for name in SPREAD for of in ("mean", "min", "max")},
    "update/learning_rate": "optim/lr",
    "updates/grad_norm/mean": "optim/grad_norm",
    "updates/grad_norm/min": "optim/grad_norm/min",
    "updates/grad_norm/max": "optim/grad_norm/max",
    "update/clipped": "optim/clipped",
    "update/tokens_per_second": "perf/throughput",
    "update/tflops_per_second": "perf/tflops",
    "update/mfu": "perf/mfu",
    "update/peak_reserved_gib": "perf/peak_memory",
    "update/peak_allocated_gib": "perf/peak_memory_allocated",
    "update/seconds_gradients": "time/gradients",
    "update/seconds_optimizer": "time/optimizer",
    "update/seconds_writing": "time/writing",
    "entropy": "entropy/{scope}/mean",
    "num_turns": "num_turns/{scope}/mean",
    "num_input_tokens": "prefill_len/{scope}/mean",
    "num_output_tokens": "decode_len/{scope}/mean",
    "longest_output": "decode_len/{scope}/max",
    "is_truncated": "is_truncated/{scope}/mean",
    "errored_rollout": "error/{scope}/mean",
    "staleness": "staleness/{scope}/mean",
}
"""The name of a measure; `{scope}` is an environment, or `all`. Of `update/...` and `updates/...` see LEFT_OUT."""
BEGINNINGS = {
    "timing/stage/": "time/",
    "tokens/stage/": "tokens/",
    "tokens_per_second/": "perf/throughput/",
    "errored_rollout/": "error/{scope}/",
}
"""The same for all measures that begin so; what follows stays."""
SAME = ("reward_mean", "reward_std", "reward_min", "reward_max", "truncated_ratio", "errored_ratio")
LEFT_OUT = {
    # A step may have several optimizer steps: their mean is sent, and not the last of them as well.
    *(f"update/{name}" for name in SPREAD if name != "learning_rate"),
    *(f"updates/learning_rate/{of}" for of in ("mean", "min", "max")),
    # What rules of gates are about, and the rollouts' own figures say already.
    *(f"batch/{name}" for name in (*SAME, "output_tokens_mean", "num_trainable", "trainable_ratio")),
    *("update/version", "update/update"),
}
"""Measures that are another name of a quantity which is sent, or that count steps."""


def tracked_name(scope: str, measure: str) -> str | None:
    """Return the name of a figure in W&B and TensorBoard; None for what is not sent."""
    if measure in LEFT_OUT:
        return None
    if measure.startswith("rewards/") and scope == ALL:
        return measure  # TRL has no environments: rewards/PART/mean
    if measure in NAMES:
        return NAMES[measure].format(scope=scope)
    begin = next((begin for begin in BEGINNINGS if measure.startswith(begin)), "")
    return BEGINNINGS[begin].format(scope=scope) + measure.removeprefix(begin) if begin else full_name(scope, measure)


def step_figures(values: Values) -> Figures:
    """Return the figures of a step by their tracked names; `time/step` is the wall-clock of all its stages."""
    found = {name: value for key, value in values.items() if (name := tracked_name(*key)) is not None}
    seconds = [value for (_, measure), value in values.items() if measure.startswith("timing/stage/")]
    return found | ({"time/step": sum(seconds)} if seconds else {})


def evaluation_figures(evaluation: Mapping[str, Any]) -> Figures:
    """Return the scores of a policy on a set of held-out examples, with the ends of their confidence intervals.

    `evaluation` has `version`, `set` and `scores` (`flows.queries.scores`). What was not scored has no figure.
    """
    found: Figures = {}
    for each in evaluation["scores"]:
        where = f"eval/{environment_title(evaluation.get('set', ''), each['environment'])}"
        attempts = each["num_attempts"] // max(1, each["num_examples"])
        found |= _with_interval(f"{where}/avg@{attempts}", each["average"], each)
        for passes in each["pass_at"]:
            found |= _with_interval(f"{where}/pass@{passes['k']}", passes["estimate"], passes)
        found[f"{where}/num_errors"] = float(sum(each["errors"].values()))
    return found | {"eval/version": float(evaluation["version"])}


def _with_interval(name: str, value: float | None, of: Mapping[str, Any]) -> Figures:
    if value is None:
        return {}
    interval = of.get("interval") or {}
    return {name: value} | {f"{name}/{end}": interval[end] for end in ("low", "high") if end in interval}

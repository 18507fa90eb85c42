"""figures.toml, read: unit, meaning and tracked name of each figure, and the charts of a run's page.

Figures are those of the table `metrics`, by scope and measure, and of the ledger. A figure that the file does not know
keeps the name that it has in the store (`tasks.metrics.figures.full_name`).
"""

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from flows.reporting.formats import environment_title
from tasks.metrics.figures import ALL, MEANINGS, Values, full_name

Figures = dict[str, float]
STEPS_OF = {"update": "of the step's last optimizer step", "updates": "over all optimizer steps of the step"}


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("figures.toml").read_text(encoding="utf-8"))


def _figures() -> dict[str, dict[str, str]]:
    rows: dict[str, dict[str, str]] = _file()["figures"]
    return rows


def chart_rows() -> list[dict[str, Any]]:
    """Return the charts of a run's page in order; the file says what each key means."""
    rows: list[dict[str, Any]] = _file()["charts"]
    return rows


class About(NamedTuple):
    """What is said of a figure."""

    unit: str
    """`share` is from 0 to 1; empty where it has none: a loss, a reward."""
    description: str


def about(measure: str) -> About:
    """Return what a figure is by the name of its measure, without its scope; of one that is not known nothing."""
    head, _, rest = measure.partition("/")
    if head == "batch":
        return About("", MEANINGS.get(rest, ""))
    of_updates = bool(rest) and head in STEPS_OF
    name = f"update/{rest}" if of_updates else measure
    rows = _figures()
    begins = [begin for begin, row in rows.items() if "description" in row and name.startswith(begin)]
    row = rows[max(begins, key=len)] if begins else {}
    description = [row.get("description", ""), STEPS_OF[head] if of_updates else ""]
    return About(row.get("unit", ""), ", ".join(filter(None, description)))


def tracked_name(scope: str, measure: str) -> str | None:
    """Return the name of a figure in W&B and TensorBoard; None for what is not sent."""
    if measure.startswith("rewards/") and scope == ALL:
        return measure  # TRL has no environments: rewards/PART/mean
    rows = _figures()
    begins = [measure, *(f"{begin}/" for begin in _beginnings(measure))]
    begin = next((begin for begin in begins if "tracked" in rows.get(begin, {})), None)
    if begin is None:
        return full_name(scope, measure)
    name = rows[begin]["tracked"].format(scope=scope)
    return name + measure.removeprefix(begin) if name else None


def _beginnings(measure: str) -> list[str]:
    parts = measure.split("/")
    return ["/".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]


def step_figures(values: Values) -> Figures:
    """Return the figures of a step by their tracked names; `time/step` is the wall-clock of all its stages."""
    figures = {name: value for key, value in values.items() if (name := tracked_name(*key)) is not None}
    seconds = [value for (_, measure), value in values.items() if measure.startswith("timing/stage/")]
    return figures | ({"time/step": sum(seconds)} if seconds else {})


def evaluation_figures(evaluation: Mapping[str, Any]) -> Figures:
    """Return the scores of a policy on a set of held-out examples, with the ends of their confidence intervals.

    `evaluation` has `version`, `set` and `scores` (`flows.queries.scores`). What was not scored has no figure.
    """
    figures: Figures = {}
    for score in evaluation["scores"]:
        where = f"eval/{environment_title(evaluation.get('set', ''), score['environment'])}"
        attempts = score["num_attempts"] // max(1, score["num_examples"])
        figures |= _with_interval(f"{where}/avg@{attempts}", score["average"], score)
        for passes in score["pass_at"]:
            figures |= _with_interval(f"{where}/pass@{passes['k']}", passes["estimate"], passes)
        figures[f"{where}/num_errors"] = float(sum(score["errors"].values()))
    return figures | {"eval/version": float(evaluation["version"])}


def _with_interval(name: str, value: float | None, of: Mapping[str, Any]) -> Figures:
    if value is None:
        return {}
    interval = of.get("interval") or {}
    return {name: value} | {f"{name}/{end}": interval[end] for end in ("low", "high") if end in interval}


def describe_warnings(steps: Iterable[Mapping[str, Any]]) -> str:
    """Return the warnings of some steps in one line, each by its rule and step; empty where there are none."""
    found = [
        f"{hit['rule']} at step {hit['step']}: {hit['text']}" for step in steps for hit in step.get("warnings", ())
    ]
    return f"warnings: {'; '.join(found)}" if found else ""

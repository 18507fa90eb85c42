"""summary: the difference of two runs in at most 40 lines of 80 columns: settings, then figures, then a rollout."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from math import isclose
from typing import Any

from flows.queries.compare import FIGURES
from flows.reporting.formats import compact_number, config_value, one_line

MAX_SETTINGS, MAX_FIGURES = 8, 10
NAME_CHARS, VALUE_CHARS, REPLY_CHARS, COMMON_CHARS = 60, 24, 48, 16
"""Characters of a name, of a setting, of a reply, and of the part that two replies have in common."""


ROUNDING = 1e-9
"""A difference up to this, or up to this share of a figure, is rounding, and listed with `--all` and in JSON alone."""


def summary(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report for people; `comparison` has the values of `stagecoach diff --json`."""
    parting, rollout = comparison["parting"], comparison["first_rollout"]
    settings = sorted(comparison["config"], key=lambda row: not row["in_keys"])
    totals = sorted(comparison["totals"], key=lambda row: FIGURES.index(row["figure"]))
    scores = [row | {"figure": f"held-out {row['environment']} {row['figure']}"} for row in comparison["evaluations"]]
    figures = [row for row in (*scores[-2:], *totals) if _differs(row)]
    return {
        **{side: one_line(run["run"], NAME_CHARS) for side, run in zip("ab", comparison["runs"], strict=True)},
        "work": "differs from step {step} on, stage {stage}".format_map(parting) if parting else "differs nowhere",
        "settings": [*map(_setting, settings[:MAX_SETTINGS])],
        "further_settings": _rest(settings, MAX_SETTINGS),
        "figures": [{name: row[name] for name in ("figure", "a", "b", "difference")} for row in figures[:MAX_FIGURES]],
        "further_figures": _rest(figures, MAX_FIGURES),
        "first_rollout": [*_rollouts(rollout)] if rollout else "differs nowhere",
    }


def _differs(row: Mapping[str, Any]) -> bool:
    return bool(row["difference"]) and not isclose(row["a"], row["b"], rel_tol=ROUNDING, abs_tol=ROUNDING)


def _setting(row: Mapping[str, Any]) -> str:
    values = [one_line(config_value(row[side]), VALUE_CHARS) for side in "ab"]
    return f"{row['key']}: {' to '.join(values)}{'' if row['in_keys'] else ' (changes no row)'}"


def _rest(rows: Sequence[Any], most: int) -> str:
    return f"{len(rows) - most} (--all)" if len(rows) > most else ""


def _rollouts(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield where two rollouts are, and of each its id, figures and reply, from just before the difference on."""
    yield f"step {row['step']}, assignment {row['assignment_id']}, example {one_line(row['example_id'], VALUE_CHARS)}"
    replies = [row[f"reply_{side}"] or "" for side in "ab"]
    common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(*replies, strict=False))])
    for side, reply in zip("ab", replies, strict=True):
        figures = [f"{name} {compact_number(row[f'{name}_{side}'])}" for name in ("reward", "advantage")]
        facts = ", ".join([row[f"trace_id_{side}"][:8], row[f"outcome_{side}"], *figures])
        yield f"{side}: {facts}: {one_line(reply[max(common - COMMON_CHARS, 0) :], REPLY_CHARS)}"

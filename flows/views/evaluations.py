"""How evaluations are told: figures with their intervals, and a table of before and after."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from flows.views.printing import grid

HEADINGS = ("held-out", "policies", "figure", "before", "after", "difference", "95% interval", "examples")


def named(set_name: str, environment: str) -> str:
    """Return how the environment of a set is called."""
    return f"{set_name}/{environment}" if set_name else environment


def with_interval(value: float | None, of: Mapping[str, Any]) -> str:
    """Return a figure with the confidence interval that is beside it, if there is one; a dash for none."""
    if value is None:
        return "-"
    return f"{value:.3f} {interval_text(of['interval'])}" if of.get("interval") else f"{value:.3f}"


def interval_text(interval: Mapping[str, float] | None, sign: str = "") -> str:
    """Return a confidence interval in brackets, a dash where there is none; `sign` is + to show the sign."""
    return "-" if interval is None else f"[{interval['low']:{sign}.3f}, {interval['high']:{sign}.3f}]"


def describe_difference(row: Mapping[str, Any]) -> str:
    """Return in a line how a figure of two policies differs."""
    first, last = row["versions"]
    begin = f"Held-out {named(row['set'], row['environment'])}, policy {first} to {last}: {row['figure']}"
    if row["difference"] is None:
        return f"{begin} of no example in common"
    interval = f" {interval_text(row['interval'], '+')}" if row["interval"] else ""
    figures = f"{row['before']:.3f} to {row['after']:.3f}, {row['difference']:+.3f}{interval}"
    return f"{begin} {figures} over the same {row['num_examples']} examples"


def before_after(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return how the figures of first and last policies differ as a table."""
    return grid(HEADINGS, [cells(row) for row in rows], left=(0, 2))


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one difference as the cells of a table with HEADINGS."""
    where = named(row["set"], row["environment"])
    figures = [_number(row[name]) for name in ("before", "after")]
    change = _number(row["difference"], "+")
    policies = "{} to {}".format(*row["versions"])
    interval = interval_text(row["interval"], "+")
    return (where, policies, row["figure"], *figures, change, interval, str(row["num_examples"]))


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"

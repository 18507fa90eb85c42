"""The comparison of two runs as sentences and tables of text, for the terminal and the viewer.

`comparison` is the result of `flows.queries.compare.compare`, with `detail` of one step if there is one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from configs.errors import differing_parts
from flows.queries.compare import DIFFERENT, ONLY_A, ONLY_B, SAME, figures_of
from flows.reporting.formats import compact_number, environment_title, interval_text
from tasks.stages import COMPARED

MAX_VALUE_CHARS = 60
STEP_FIGURES = ("reward_mean", "num_kept", "fill", "loss", "grad_norm", "mismatch_kl", "masked_fraction")
DETAILS = {
    "verdicts": "shared traces with another verdict",
    "samples": "shared samples whose advantages differ most",
}
Comparison = Mapping[str, Any]


class Sheet(NamedTuple):
    """A table of text; an empty one is not shown, except the steps."""

    name: str
    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sentences(comparison: Comparison) -> list[str]:
    """Return whether the work of two runs is the same, and from where on it differs."""
    num_shared = sum(piece["state"] == SAME for piece in comparison["pieces"] if piece["stage"] != "gate")
    parting = comparison["parting"]
    if not num_shared:
        return ["They have nothing in common: no result has the same key in both."]
    if parting is None and not comparison["together"]["steps"]:
        return [f"No step is in both. Results with the same keys: {num_shared}."]
    if comparison["same_work"]:
        lines = [f"The same work: all {num_shared} results have the same keys, so their rows are equal."]
    elif parting is None:
        lines = [f"The same work as far as both go: {num_shared} results have the same keys."]
    else:
        how = {DIFFERENT: "another key", ONLY_A: "only a has it", ONLY_B: "only b has it"}[parting["state"]]
        where = f"step {parting['step']}, stage {parting['stage']}"
        lines = [f"They differ from {where} on: {how}. Shared results: {num_shared}."]
    for state in (ONLY_A, ONLY_B):
        if steps := [step["step"] for step in comparison["steps"] if step["only"] == state]:
            lines.append(f"{state.capitalize()}: step {ranges(steps)}.")
    if comparison["weights_part_at"] is not None:
        lines.append(f"The weights part at step {comparison['weights_part_at']}.")
    elif any(step["weights_equal"] for step in comparison["steps"]):
        lines.append("The weights are equal.")
    return lines


def summary_lines(comparison: Comparison) -> list[str]:
    """Return a line with the runs that are compared, and the sentences."""
    sides = zip("ab", comparison["runs"], strict=True)
    runs = [f"{side}: {r['run']} ({r['kind']}, {r['state']}, steps: {r['num_steps']})" for side, r in sides]
    return ["   ".join(runs), *sentences(comparison)]


def sheets(comparison: Comparison) -> list[Sheet]:
    """Return the tables that have a row, and the steps that both runs have."""
    states = (SAME, DIFFERENT, ONLY_A, ONLY_B)
    counts = Counter((piece["stage"], piece["state"]) for piece in comparison["pieces"])
    stages = [(stage, *(counts[stage, state] for state in states)) for stage in COMPARED]
    settings = sorted(comparison["config"], key=lambda setting: not setting["in_keys"])
    figures = [(*row.values(),) for row in figures_of(comparison["together"])]
    evaluations = [
        (
            *(environment_title(row["set"], row["environment"]), both_numbers(row["version_a"], row["version_b"])),
            *(row["figure"], row["a"], row["b"], row["difference"]),
            interval_text(None if row["low"] is None else row, "+"),
        )
        for row in comparison["evaluations"]
    ]
    steps = [
        (
            *(str(step["step"]), step["first_difference"] or "none"),
            *(both_numbers(step["a"].get(name), step["b"].get(name)) for name in STEP_FIGURES),
            {None: "-", True: "equal", False: "differ"}[step["weights_equal"]],
        )
        for step in comparison["steps"]
        if step["only"] is None
    ]
    names = [name.replace("_", " ") for name in STEP_FIGURES]
    in_both = ranges(comparison["together"]["steps"]) or "none"
    both = ("figure", "a", "b", "b - a")
    tables = [
        _sheet("config", "settings that differ", ("setting", "a", "b", "can change rows"), map(_setting, settings)),
        _sheet("stages", "results", ("stage", *states), [row for row in stages if any(row[1:])]),
        _sheet("figures", f"over the steps that both have ({in_both})", both, figures),
        _sheet(
            *("evaluations", "held-out examples that both were scored on"),
            *(("environment", "policy", *both, "95% interval"), evaluations),
        ),
        _sheet(
            *("steps", "step by step, where both have it"),
            *(("step", "first difference", *names, "weights"), steps),
        ),
    ]
    for name, rows in comparison.get("detail", {}).items():
        headings = [heading.replace("_", " ") for heading in rows[0]] if rows else []
        tables.append(_sheet(name, DETAILS[name], headings, [row.values() for row in rows]))
    return [sheet for sheet in tables if sheet.rows or sheet.name == "steps"]


def _sheet(name: str, title: str, headings: Sequence[str], rows: Iterable[Iterable[Any]]) -> Sheet:
    return Sheet(name, title, tuple(headings), tuple(tuple(map(_cell, row)) for row in rows))


def _setting(setting: Mapping[str, Any]) -> tuple[Any, ...]:
    a, b = setting["a"], setting["b"]
    if setting["key"].endswith(".version") and a and b:
        a, b = differing_parts(a, b)  # a version has several parts
    values = ("-" if value is None else str(value) or "''" for value in (a, b))
    return setting["key"], *values, "yes" if setting["in_keys"] else "no"


def _cell(value: Any) -> str:
    if not isinstance(value, str):
        return compact_number(value)
    return value if len(value) <= MAX_VALUE_CHARS else f"{value[: MAX_VALUE_CHARS - 3]}..."


def both_numbers(a: float | None, b: float | None) -> str:
    """Return one number where both are the same, else both with as many digits as tell them apart."""
    texts = [compact_number(number) for number in (a, b)]
    if a != b and texts[0] == texts[1]:
        texts = [f"{number:.8g}" for number in (a, b)]
    return texts[0] if a == b else " → ".join(texts)


def ranges(steps: Sequence[int]) -> str:
    """Return ascending numbers in few characters, such as 0-4, 7."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(steps), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

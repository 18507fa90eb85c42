"""The comparison of two runs as sentences and tables of text, for the terminal, the viewer and Prefect.

`comparison` is the result of `flows.queries.compare.compare`, with `detail` of one step if there is one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from configs.errors import differing_parts
from flows.queries.compare import DIFFERENT, ONLY_A, ONLY_B, SAME, figures_of
from flows.reporting.formats import compact_number, environment_title, fixed_point, interval_text
from tasks.stages import COMPARED

MAX_VALUE_CHARS = 60
STEP_FIGURES = ("reward_mean", "num_kept", "fill", "loss", "grad_norm", "mismatch_kl", "masked_fraction")
Comparison = Mapping[str, Any]


class Sheet(NamedTuple):
    """A table of text; an empty one is not shown, except the steps."""

    name: str
    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sentences(comparison: Comparison) -> list[str]:
    """Return whether the work of two runs is the same, and from where on it differs."""
    num_shared = sum(piece["state"] == SAME for piece in comparison["pieces"])
    if comparison["runs"][0]["run"] == comparison["runs"][1]["run"]:
        return ["This is the same run on both sides."]
    if not num_shared:
        return ["They have nothing in common: no result has the same key in both."]
    if comparison["parting"] is None and not comparison["together"]["steps"]:
        return [f"No step is in both. Results with the same keys: {num_shared}."]
    return [*_work(comparison), *_weights(comparison)]


def summary_lines(comparison: Comparison) -> list[str]:
    """Return a line with the runs that are compared, and the sentences."""
    sides = zip("ab", comparison["runs"], strict=True)
    runs = [f"{side}: {r['run']} ({r['kind']}, {r['state']}, steps: {r['num_steps']})" for side, r in sides]
    return ["   ".join(runs), *sentences(comparison)]


def _work(comparison: Comparison) -> list[str]:
    num_shared = sum(piece["state"] == SAME for piece in comparison["pieces"] if piece["stage"] != "gate")
    parting = comparison["parting"]
    if comparison["same_work"]:
        return [f"The same work: all {num_shared} results have the same keys, so their rows are equal."]
    only = {
        state: [step["step"] for step in comparison["steps"] if step["only"] == state] for state in (ONLY_A, ONLY_B)
    }
    lone = [f"{state.capitalize()}: step {ranges(steps)}." for state, steps in only.items() if steps]
    if parting is None:
        return [f"The same work as far as both go: {num_shared} results have the same keys.", *lone]
    how = {DIFFERENT: "another key", ONLY_A: "only a has it", ONLY_B: "only b has it"}[parting["state"]]
    where = f"step {parting['step']}, stage {parting['stage']}"
    return [f"They differ from {where} on: {how}. Shared results: {num_shared}.", *lone]


def _weights(comparison: Comparison) -> list[str]:
    step = comparison["weights_part_at"]
    if step is not None:
        return [f"The weights part at step {step}."]
    return ["The weights are equal."] if any(row["weights_equal"] for row in comparison["steps"]) else []


def sheets(comparison: Comparison) -> list[Sheet]:
    """Return the tables that have a row, and the steps that both runs have."""
    tables = [_config(comparison), _stages(comparison), _figures(comparison), _evaluations(comparison)]
    tables += [_steps(comparison), *_detail(comparison.get("detail", {}))]
    return [sheet for sheet in tables if sheet.rows or sheet.name == "steps"]


def _config(comparison: Comparison) -> Sheet:
    rows = []
    for setting in sorted(comparison["config"], key=lambda setting: not setting["in_keys"]):
        values = setting["a"], setting["b"]
        if setting["key"].endswith(".version") and all(values):
            values = differing_parts(*values)  # a version has several parts
        rows.append((setting["key"], *map(_brief, values), "yes" if setting["in_keys"] else "no"))
    return Sheet("config", "settings that differ", ("setting", "a", "b", "can change rows"), tuple(rows))


def _stages(comparison: Comparison) -> Sheet:
    states = (SAME, DIFFERENT, ONLY_A, ONLY_B)
    counts = {stage: Counter(p["state"] for p in comparison["pieces"] if p["stage"] == stage) for stage in COMPARED}
    rows = tuple((stage, *(str(count[state]) for state in states)) for stage, count in counts.items() if count)
    return Sheet("stages", "results", ("stage", *states), rows)


def _figures(comparison: Comparison) -> Sheet:
    together = comparison["together"]
    rows = [
        (row["figure"], compact_number(row["a"]), compact_number(row["b"]), _change_text(row["difference"]))
        for row in figures_of(together)
    ]
    title = f"over the steps that both have ({ranges(together['steps']) or 'none'})"
    return Sheet("figures", title, ("figure", "a", "b", "b - a"), tuple(rows))


def _evaluations(comparison: Comparison) -> Sheet:
    rows = [
        (
            environment_title(row["set"], row["environment"]),
            both_numbers(row["version_a"], row["version_b"]),
            *(row["figure"], fixed_point(row["a"]), fixed_point(row["b"]), fixed_point(row["difference"], "+")),
            interval_text(None if row["low"] is None else row, "+"),
        )
        for row in comparison["evaluations"]
    ]
    headings = ("environment", "policy", "figure", "a", "b", "b - a", "95% interval")
    return Sheet("evaluations", "held-out examples that both were scored on", headings, tuple(rows))


def _steps(comparison: Comparison) -> Sheet:
    rows = []
    for step in comparison["steps"]:
        if step["only"] is None:
            figures = (both_numbers(step["a"].get(name), step["b"].get(name)) for name in STEP_FIGURES)
            weights = {None: "-", True: "equal", False: "differ"}[step["weights_equal"]]
            rows.append((str(step["step"]), step["first_difference"] or "none", *figures, weights))
    names = (name.replace("_", " ") for name in STEP_FIGURES)
    headings = ("step", "first difference", *names, "weights")
    return Sheet("steps", "step by step, where both have it", headings, tuple(rows))


def _detail(detail: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Sheet]:
    titles = {
        "verdicts": "shared traces with another verdict",
        "samples": "shared samples whose advantages differ most",
        "groups": "shared groups that differ most",
    }
    tables = []
    for name, rows in detail.items():
        headings = tuple(heading.replace("_", " ") for heading in rows[0]) if rows else ()
        cells = [tuple(v if isinstance(v, str) else compact_number(v) for v in row.values()) for row in rows]
        tables.append(Sheet(name, titles[name], headings, tuple(cells)))
    return tables


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


def _change_text(change: float | None) -> str:
    if not change:
        return "-" if change is None else "0"
    return f"{change:+,}" if isinstance(change, int) else f"{change:+.3g}"


def _brief(value: Any) -> str:
    text = "-" if value is None else str(value) or "''"
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."

"""The rewards of several runs, step by step, as a page with a picture: for comparing how they learn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.run import RunConfig
from flows.cli.run_summary import describe
from flows.queries.store_reader import recorded_run
from flows.reporting.artifacts import escaped
from flows.reporting.curve import Point, curves_svg
from flows.reporting.formats import console, fixed, grid, markdown_table
from storage.errors import border
from storage.read.frames import existing_store


def main(runs: Sequence[str], store: str = "", output: str = "") -> int:
    """Print the rewards of runs beside each other, or write a page and, beside it, its picture; return 0.

    Raises ConfigError for an unknown run.
    """
    root = existing_store(store or RunConfig().store)
    named = [recorded_run(root, name) for name in runs]
    found = [describe(root, name, config, ()) for name, config in named]
    rows = _rows(found)
    headings = ["step", *(each["run"] for each in found)]
    if not output:
        console().print(grid(headings, rows, left=()))
        return 0
    picture = Path(output).with_suffix(".svg")
    series = {each["run"]: [Point(s["step"], s["reward"]) for s in _scored(each)] for each in found}
    with border("writing a page", output):
        picture.write_text(curves_svg(series, "mean reward by step"), encoding="utf-8")
        Path(output).write_text(_page(runs, picture.name, found, markdown_table(headings, rows)), encoding="utf-8")
    print(f"written to {output} and {picture}")
    return 0


def _page(runs: Sequence[str], picture: str, found: Sequence[dict[str, Any]], table: Sequence[str]) -> str:
    scores = [
        f"| {each['run']} | {score['version']} | {escaped(one['environment'])} | {fixed(one['average'])} |"
        for each in found
        for score in each["evaluations"]
        for one in score["scores"]
    ]
    lines = [
        "# Learning curves, side by side",
        "",
        "The mean reward of each step's rollouts. Made by:",
        "",
        "```bash",
        f"stagecoach curves {' '.join(runs)}",
        "```",
        "",
        f"![curves]({picture})",
        "",
        *table,
    ]
    if scores:
        lines += [
            "",
            "On held-out examples:",
            "",
            "| run | policy version | environment | score |",
            "|---|---:|---|---:|",
        ]
    return "\n".join([*lines, *scores]) + "\n"


def _rows(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    rewards = [{step["step"]: step["reward"] for step in _scored(each)} for each in found]
    steps = sorted({step for each in rewards for step in each})
    return [[str(step), *(fixed(each.get(step)) for each in rewards)] for step in steps]


def _scored(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for step in run["steps"] if step["reward"] is not None]

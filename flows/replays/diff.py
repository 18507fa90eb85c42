"""Diff: how two runs of a store differ, for the terminal, as JSON for programs, and as artifacts in Prefect."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from configs.run import RunConfig
from flows.queries.compare import compare
from flows.queries.compare_summary import sentences, sheets
from flows.queries.store_reader import StoreReader
from flows.reporting.artifacts import artifact_key, escaped
from flows.reporting.formats import console, grid, markdown_table, visible
from flows.reporting.panel import printable
from storage.store import Store

_log = logging.getLogger("stagecoach")


def main(a: str, b: str, step: int | None = None, as_json: bool = False, store: str = "") -> int:
    """Print how run `b` differs from run `a`, with `step` down to samples; return the exit status.

    Raises ConfigError for an unknown run or step, LayoutError where there is no store.
    """
    found = compare(StoreReader.at(store or RunConfig().store), a, b, step)
    if as_json:
        print(json.dumps(found, sort_keys=True))
    else:
        _print(found)
    return 0


def publish_diff(store: Store, a: str, b: str) -> dict[str, Any]:
    """Compare two runs and show it in Prefect, in the flow run around; return the differences.

    A Prefect API that does not answer is only told of: what was found does not depend on it.
    """
    import httpx
    from prefect.artifacts import create_markdown_artifact, create_table_artifact

    found = compare(StoreReader(store), a, b)
    names = f"{a}-{b}"
    about = f"Run {escaped(b)} against {escaped(a)}"
    try:
        create_markdown_artifact(markdown(found), key=artifact_key("diff", names), description=about)
        create_table_artifact(table_rows(found), key=artifact_key("diff-steps", names), description=f"{about}, by step")
    except httpx.HTTPError as problem:
        _log.warning("the differences are not shown in Prefect: %s", problem)
    return found


def markdown(found: Mapping[str, Any]) -> str:
    """Return the differences as a page of markdown."""
    a, b = (each["run"] for each in found["runs"])
    lines = [f"# {escaped(a)} and {escaped(b)}"]
    for sentence in sentences(found):
        lines += ["", escaped(sentence)]
    for sheet in sheets(found):
        cells = [map(escaped, row) for row in sheet.rows]
        table = markdown_table(map(escaped, sheet.headings), cells, numbers=False)
        lines += ["", f"## {escaped(sheet.title)}", "", *table]
    return "\n".join(lines)


def table_rows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the differences by step as rows of a table artifact."""
    (by_step,) = (sheet for sheet in sheets(found) if sheet.name == "steps")
    return [dict(zip(by_step.headings, map(visible, row), strict=True)) for row in by_step.rows]


def _print(found: Mapping[str, Any]) -> None:
    out = console()
    for sentence in sentences(found):
        out.print(printable(sentence))
    for sheet in sheets(found):
        out.print(f"\n{printable(sheet.title)}", style="bold")
        out.print(grid(sheet.headings, sheet.rows))

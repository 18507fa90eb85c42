"""The runs of a store as a list, and the logs of a run's services."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from configs.run import RunConfig
from flows.cli.arguments import UsageError
from flows.queries.runs import runs
from flows.queries.store_reader import StoreReader, recorded_run
from flows.reporting.formats import compact_number, console, grid, seconds, size
from storage.read.frames import existing_store
from storage.roots import check_links

Row = dict[str, Any]


def list_runs(store: str = "", kind: str = "", state: str = "", as_json: bool = False) -> int:
    """Print the runs of a store, the newest last, those of a kind or in a state alone where one is named; return 0.

    Raises LayoutError where there is no store; none is made.
    """
    library = StoreReader.at(store or RunConfig().store)
    found = [row for row in runs(library).to_dicts() if kind in ("", row["kind"]) and state in ("", row["state"])]
    if as_json:
        print(json.dumps(found, default=lambda moment: moment.isoformat()))
        return 0
    headings = ("run", "kind", "state", "steps", "reward", "held out", "took", "changed", "size")
    console().print(grid(headings, map(_cells, found), left=(0, 1, 2)) if found else "no runs")
    return 0


def _cells(row: Row) -> tuple[str, ...]:
    rewards = [compact_number(each) for each in row["rewards"] if each is not None]
    ago = (datetime.now(UTC) - row["changed_at"]).total_seconds()
    return (
        row["run"],
        row["kind"],
        row["state"],
        f"{row['steps_done']}/{row['steps_planned']}" if row["steps_planned"] is not None else str(row["steps_done"]),
        " to ".join(dict.fromkeys(rewards[:1] + rewards[-1:])) or "-",
        compact_number(row["held_out"]),
        seconds(row["seconds"]),
        f"{seconds(max(ago, 0.0))} ago",
        size(row["bytes"]),
    )


def show_logs(run: str, service: str = "", lines: int = 40, follow: bool = False, store: str = "") -> int:
    """Print the last lines of the logs of a run's services, by the program `tail`; with `follow` until Ctrl-C.

    Raises ConfigError for an unknown run, UsageError where the run has no such log on this machine.
    """
    root = existing_store(store or RunConfig().store, read_only=True)
    name, _ = recorded_run(root, run)
    directory = root.root.directory
    found: list[Path] = []
    if directory is not None:
        check_links(directory, f"logs/{name}")
        found = sorted((directory / "logs" / name).glob("*.log"))
    wanted = [each for each in found if service in ("", each.stem)]
    if not wanted:
        known = ", ".join(each.stem for each in found) or "none on this machine"
        raise UsageError(f"run {name!r} has no log of {service or 'a service'}; there is: {known}")
    files = [str(each) for each in wanted]
    os.execvp("tail", ["tail", "-n", str(lines), *(["-F"] if follow else []), "--", *files])

"""print_report: plain values of a report as JSON for programs, or as lines and tables for people."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from flows.reporting.formats import compact_number, console, grid, say, size


def print_report(report: Mapping[str, Any], as_json: bool = False) -> None:
    """Print a report: as one line of JSON, or by the names of its values, without those that are empty or zero.

    A list of records is a table, a list of texts has a line for each. Names that contain `bytes` are sizes in bytes.
    """
    if as_json:
        print(json.dumps(report, sort_keys=True, default=datetime.isoformat))
        return
    for name, value in report.items():
        title = name.replace("_", " ")
        if isinstance(value, Mapping) and value:
            for key, entry in value.items():  # keys are names, of runs for example
                if entry:
                    say(f"{title}: {key}: {cell('', entry)}")
        elif not isinstance(value, list | tuple):
            if value:
                say(f"{title}: {cell(name, value)}")
        elif value and isinstance(value[0], Mapping):
            say(f"{title}:")
            cells = ([cell(key, entry) for key, entry in record.items()] for record in value)
            texts = [index for index, entry in enumerate(value[0].values()) if not isinstance(entry, int | float)]
            console().print(grid((key.replace("_", " ") for key in value[0]), cells, left=texts))
        else:
            for text in value:
                say(f"{title}: {text}")


def cell(name: str, value: Any) -> str:
    """Return a value of a report by its name as a text; what is none is a dash."""
    if "bytes" in name:
        return size(value)
    if isinstance(value, float):
        return compact_number(value, ".4g")
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds")
    if isinstance(value, Mapping):
        value = [f"{key} {entry}" for key, entry in value.items()]
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)

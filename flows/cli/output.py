"""print_report: plain values of a report as JSON for programs, or as lines and tables for people."""

import json
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import datetime
from typing import Any

from flows.reporting.formats import compact_number, console, fits_width, grid, say, seconds, size, tab_separated

Record = Mapping[str, Any]


def print_records(
    records: Sequence[Record],
    cells: Callable[[Record], Record],
    left: Container[int],
    as_json: bool = False,
    num_optional: int = 0,
) -> None:
    """Print records of the same names: as JSON, on a terminal as a table of `cells`, in a pipe as lines with tabs.

    A pipe gets the names and values of the JSON. `cells` are texts by heading, those at the places `left` at the left.
    The last `num_optional` columns are left out where the terminal is too narrow.
    """
    if as_json:
        print(json.dumps(records, sort_keys=True, default=datetime.isoformat))
    elif records and not fits_width():
        print(tab_separated(records[0], (record.values() for record in records)))
    elif records:
        rows = [cells(record) for record in records]
        console().print(grid(rows[0], (row.values() for row in rows), left, num_optional))


def print_report(report: Mapping[str, Any], as_json: bool = False) -> None:
    """Print a report: as one line of JSON, or by the names of its values, without those that are empty or zero.

    A list of records is a table, in a pipe lines with tabs; a list of texts has a line for each. Names that contain
    `bytes` are sizes in bytes, those that contain `seconds` times.
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
            if len(report) > 1:
                say(f"{title}:")
            texts = [index for index, entry in enumerate(value[0].values()) if not isinstance(entry, int | float)]
            print_records(value, _cells, texts)
        else:
            for text in value:
                say(f"{title}: {text}")


def _cells(record: Record) -> Record:
    return {name.replace("_", " "): cell(name, value) for name, value in record.items()}


def cell(name: str, value: Any) -> str:
    """Return a value of a report by its name as a text; what is none is a dash."""
    if "bytes" in name:
        return size(value)
    if "seconds" in name and isinstance(value, float):
        return seconds(value)
    if isinstance(value, float):
        return compact_number(value, ".4g")
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds")
    if isinstance(value, Mapping):
        value = [f"{key} {entry}" for key, entry in value.items()]
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)

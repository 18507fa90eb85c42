"""Examples: what the environments, or a file of demonstrations, have to offer.

Reads nothing but its source; writes examples.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import polars as pl
import pyarrow as pa

from configs.run import View
from storage.schemas import EXAMPLES
from tasks.stage import Stage, Tables, as_task

DEMONSTRATIONS = "demonstrations"
"""The name that rows of a demonstrations file carry where others carry their environment's."""


class ExampleSource(Protocol):
    """What the stage asks of whoever can load environments, in a process of their own."""

    def examples(self) -> pa.Table:
        """Return the examples of every environment of the run, in the EXAMPLES schema."""
        ...


def examples(tables: Tables, config: View, *, environments: ExampleSource) -> Tables:
    """List the examples of every environment, each with its split by hash of its content."""
    return {"examples": environments.examples()}


def demonstration_examples(tables: Tables, config: View, *, source: str) -> Tables:
    """List the rows of a demonstrations file, each as messages."""
    return {"examples": read_demonstrations(Path(source))}


def read_demonstrations(path: Path) -> pa.Table:
    """Return a JSONL or Parquet file of prompt and completion, or of messages, as EXAMPLES rows.

    Raises ValueError naming file and row when a row has neither `messages` nor `prompt` and `completion`.
    """
    frame = pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_ndjson(path)
    rows = [_example(path, number, row) for number, row in enumerate(frame.iter_rows(named=True))]
    return pa.Table.from_pylist(rows, schema=EXAMPLES.arrow)


def _example(path: Path, number: int, row: dict[str, Any]) -> dict[str, str]:
    task = json.dumps({"messages": _messages(path, number, row)}, sort_keys=True)
    digest = hashlib.sha256(task.encode()).hexdigest()[:16]
    return {"environment": DEMONSTRATIONS, "example_id": f"{number}-{digest}", "split": "train", "task": task}


def _messages(path: Path, number: int, row: dict[str, Any]) -> list[dict[str, Any]]:
    if row.get("messages"):
        return list(row["messages"])
    if row.get("prompt") is None or row.get("completion") is None:
        raise ValueError(
            f"{path}, row {number}: needs `messages`, or `prompt` and `completion`; it has {sorted(row)}. Nothing was "
            f"stored. Mend the row and run again."
        )
    return _as_messages(row["prompt"], "user") + _as_messages(row["completion"], "assistant")


def _as_messages(value: str | list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


STAGE = Stage(
    name="examples",
    version=1,
    reads=(),
    writes=("examples",),
    sections=("environments",),
    function=examples,
    needs=("environments",),
)
DEMONSTRATION_STAGE = Stage(
    name="examples",
    version=1,
    reads=(),
    writes=("examples",),
    sections=(),
    function=demonstration_examples,
    needs=("source",),
)
task = as_task(STAGE)
demonstration_task = as_task(DEMONSTRATION_STAGE)

"""Examples: what the environments, or a file of demonstrations, have to offer, and which have wanted values.

Reads nothing but its source; writes examples.
"""

import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from storage.schemas.stage_tables import EXAMPLES
from tasks.arrays.columns import texts
from tasks.runtime.prefect_task import as_task
from tasks.runtime.services import ExampleSource, require
from tasks.runtime.stage import Attempt, Stage, Tables

DEMONSTRATIONS = "demonstrations"
"""The name that rows of a demonstrations file carry where others carry their environment's."""
PREFERENCES = "preferences"
"""The same of pairs of recorded rollouts."""
_COLUMNS = ("messages", "prompt", "completion")
_PARTS = re.compile(rb'"content"\s*:\s*\[')
"""Stands in a JSON text where a message has parts."""
_MEND = "Nothing was stored. Mend the file and run again"


class DemonstrationsUnusable(ValueError):
    """A file of demonstrations cannot be read, or a row of it is no demonstration."""


def examples(source: ExampleSource, config: View) -> Tables:
    """List the examples of every environment, each with its split by hash of its content."""
    return {"examples": source.examples([environment.name for environment in config.environments])}


def demonstration_examples(file: Path, config: View) -> Tables:
    """List the rows of a demonstrations file, each as messages."""
    return {"examples": read_demonstrations(file)}


def preference_examples(pairs: Sequence[Mapping[str, Any]], config: View) -> Tables:
    """List pairs of recorded rollouts; see `tasks.rollout.preference`."""
    rows = [_row(PREFERENCES, number, pair) for number, pair in enumerate(pairs)]
    return {"examples": pa.Table.from_pylist(rows, schema=EXAMPLES.arrow)}


def read_demonstrations(path: Path) -> pa.Table:
    """Return a JSONL or Parquet file of prompt and completion, or of messages, as EXAMPLES rows.

    Where a message of a JSONL file has parts, as with pictures, the text of each other one becomes a part. A row may
    have `tools`: the schemas of what its messages call, as a list or as JSON text. Text is read as it is; in a list,
    every schema gets the fields of all others, empty.

    Raises DemonstrationsUnusable like `read_rows`.
    """
    rows = [_example(number, row) for number, row in enumerate(read_rows(path).iter_rows(named=True))]
    return pa.Table.from_pylist(rows, schema=EXAMPLES.arrow)


def read_rows(path: Path) -> pl.DataFrame:
    """Return the rows of a demonstrations file as they are, each known to be a demonstration.

    Raises DemonstrationsUnusable naming the file, and the row when one has neither `messages` nor `prompt` and
    `completion`.
    """
    if path.is_file() and not path.stat().st_size:  # polars says it in other words for each format
        raise DemonstrationsUnusable(f"data.path: {path} is empty. {_MEND}")
    try:
        is_parquet = path.suffix == ".parquet"
        frame = pl.read_parquet(path) if is_parquet else _read_lines(path)
    except (OSError, ValueError, pl.exceptions.PolarsError) as error:
        form = "a Parquet file" if is_parquet else "a JSONL file, one JSON object in each line"
        raise DemonstrationsUnusable(f"data.path: {path} cannot be read as {form}: {error}. {_MEND}") from error
    if not frame.height:
        raise DemonstrationsUnusable(f"data.path: {path} holds no rows. {_MEND}")
    number = _first_unusable(frame)
    if number is not None:
        has = sorted(name for name, value in frame.row(number, named=True).items() if value is not None)
        raise DemonstrationsUnusable(
            f"data.path: {path}, row {number} (the first is 0): needs `messages`, or `prompt` and `completion`; "
            f"it has {', '.join(has) or 'nothing'}. {_MEND}"
        )
    return frame


def _read_lines(path: Path) -> pl.DataFrame:
    """Return the rows of a JSONL file; a text among contents that have parts, as pictures are, becomes a part, too."""
    source: Path | io.BytesIO = path
    data = path.read_bytes()
    # A column has one type: beside a text, polars makes a text of the parts, or refuses the file.
    if _PARTS.search(data):
        rows = (json.loads(line, object_hook=_in_parts) for line in data.splitlines() if line.strip())
        source = io.BytesIO("\n".join(map(json.dumps, rows)).encode())
    # Types are taken from all rows: those of the first hundred may not fit the rest.
    return pl.read_ndjson(source, infer_schema_length=None)


def _in_parts(found: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its text as a part; anything else as it is."""
    text = found.get("content")
    if "role" not in found or not isinstance(text, str):
        return found
    # Before a call of a tool, renderers break the line after a part that is there, also where it is empty.
    return found | {"content": [{"type": "text", "text": text}] if text else []}


def _first_unusable(frame: pl.DataFrame) -> int | None:
    """Return the number of the first row that is no demonstration, or None."""
    given = {name: pl.col(name).is_not_null() if name in frame.columns else pl.lit(False) for name in _COLUMNS}
    if isinstance(frame.schema.get("messages"), pl.List):
        given["messages"] &= pl.col("messages").list.len() > 0
    usable = frame.select(usable=given["messages"] | (given["prompt"] & given["completion"]))["usable"]
    wrong = (~usable.fill_null(False)).arg_true()
    return int(wrong[0]) if len(wrong) else None


def _example(number: int, row: dict[str, Any]) -> dict[str, str]:
    # Sorted, so that the order of fields in a file does not change the digest, which is the id.
    content: dict[str, Any] = json.loads(json.dumps({"messages": _messages(row)}, sort_keys=True))
    if tools := row.get("tools"):
        # In the order given: a template writes a schema as it comes, and a server offers it in that order too.
        content["tools"] = json.loads(tools) if isinstance(tools, str) else tools
    return _row(DEMONSTRATIONS, number, content)


def _row(environment: str, number: int, content: Mapping[str, Any]) -> dict[str, str]:
    task = json.dumps(content)
    digest = hashlib.sha256(task.encode()).hexdigest()[:16]
    return {"environment": environment, "example_id": f"{number}-{digest}", "split": "train", "task": task}


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    if row.get("messages"):
        return list(row["messages"])
    return _as_messages(row["prompt"], "user") + _as_messages(row["completion"], "assistant")


def _as_messages(value: str | list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


ABSENT = object()
"""What a field is that a task does not have; one that is null is there."""


class FieldMissing(ValueError):
    """Examples are to be distinguished by a field that their tasks do not have."""


def field_of(task: Mapping[str, Any], name: str) -> Any:
    """Return a field of a task's data, nested ones with dots; ABSENT where there is none."""
    value: Any = task
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


def values_of(examples: pa.Table, environment: str, name: str) -> list[Any]:
    """Return a field of every example in turn, all of one environment. Raises FieldMissing where one lacks it."""
    tasks = [json.loads(text) for text in texts(examples["task"])]
    found = [field_of(task, name) for task in tasks]
    lacking = [number for number, value in enumerate(found) if value is ABSENT]
    if lacking:
        has = ", ".join(sorted(tasks[lacking[0]])) or "none"
        raise FieldMissing(
            f"environment {environment!r}: {len(lacking)} of {len(tasks)} examples have no field {name!r}, first "
            f"{examples['example_id'][lacking[0]]}, whose task has the fields {has}. Nothing was sampled. Name a field "
            "that all have, or give the environment a set of its own (evaluation.sets)"
        )
    return found


def having(examples: pa.Table, environment: str, split: str, where: Mapping[str, Sequence[Any]]) -> pa.Table:
    """Return the examples of an environment's split whose fields have wanted values, in order; all without a filter.

    Values are the same where they are of one type and equal: true is not 1. Raises FieldMissing.
    """
    kept = examples.filter((pc.field("environment") == environment) & (pc.field("split") == split))
    for name, wanted in where.items():
        values = values_of(kept, environment, name)
        fits = [any(_same(value, each) for each in wanted) for value in values]
        kept = kept.filter(pa.array(fits, pa.bool_()))
    return kept


def _example_source(attempt: Attempt) -> ExampleSource:
    return require(attempt.services.example_source)


def _demonstrations_file(attempt: Attempt) -> Path:
    return Path(attempt.parameters)


def _recorded_pairs(attempt: Attempt) -> Sequence[Mapping[str, Any]]:
    pairs: Sequence[Mapping[str, Any]] = attempt.parameters
    return pairs


def _same(value: Any, wanted: Any) -> bool:
    # Python calls True equal to 1; who asks for tier 1 does not mean a flag.
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


STAGE = Stage(
    name="examples",
    version=1,
    reads=(),
    writes=("examples",),
    sections=("environments", "prompt_limits"),
    read_inputs=_example_source,
    function=examples,
    services=("example_source",),
)
DEMONSTRATION_STAGE = Stage(
    name="examples",
    version=1,
    reads=(),
    writes=("examples",),
    sections=(),
    read_inputs=_demonstrations_file,
    function=demonstration_examples,
)
PREFERENCE_STAGE = Stage(
    name="examples",
    version=1,
    reads=(),
    writes=("examples",),
    sections=(),
    read_inputs=_recorded_pairs,
    function=preference_examples,
)
task = as_task(STAGE)
demonstration_task = as_task(DEMONSTRATION_STAGE)
preference_task = as_task(PREFERENCE_STAGE)

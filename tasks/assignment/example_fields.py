"""Fields of examples: what the task data of an example say, by dotted name, and which examples have wanted values."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import texts

ABSENT = object()
"""What a field is that a task does not have; one that is null is there."""


class FieldMissing(ValueError):
    """Examples are to be told apart by a field that their tasks do not have."""


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


def _same(value: Any, wanted: Any) -> bool:
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)

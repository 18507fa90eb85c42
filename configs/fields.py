"""What all sections of a config are made of: the base model, and what a field may say about keys."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

OPERATIONAL: dict[str, Any] = {"operational": True}
ELSEWHERE: dict[str, Any] = {"elsewhere": True}
LATER: dict[str, Any] = {"later": True}


def operational(default: Any = ..., **constraints: Any) -> Any:
    """A field that cannot change rows and so is not part of any key."""
    return Field(default, json_schema_extra=OPERATIONAL, **constraints)


def elsewhere(default: Any = ..., **constraints: Any) -> Any:
    """A field that is in keys, but not where it is written: `RunConfig` has a property that gathers it."""
    return Field(default, json_schema_extra=ELSEWHERE, **constraints)


def later(default: Any = None, **constraints: Any) -> Any:
    """A field that was added after runs had been recorded: in keys only where it differs from its default.

    The default must be what was done before there was the field. So work of older stores is still found, and a feature
    that is off leaves no trace.
    """
    return Field(default, json_schema_extra=LATER, **constraints)


def is_operational(field: FieldInfo) -> bool:
    """Tell whether a field is marked as one that cannot change rows."""
    return _marked(field, "operational")


def is_elsewhere(field: FieldInfo) -> bool:
    """Tell whether a field is in keys under what gathers it, and not where it is written."""
    return _marked(field, "elsewhere")


def in_key(field: FieldInfo, value: Any) -> bool:
    """Tell whether a field with this value is part of its section's share of a key."""
    if _marked(field, "later"):
        return bool(value != field.default)
    return not is_operational(field) and not is_elsewhere(field)


def _marked(field: FieldInfo, mark: str) -> bool:
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get(mark))


class Section(BaseModel):
    """A frozen part of the config that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

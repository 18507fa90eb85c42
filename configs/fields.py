"""The base model of all sections of a config, and the marks by which a field says whether it is part of keys."""

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

OPERATIONAL: dict[str, Any] = {"operational": True}
ELSEWHERE: dict[str, Any] = {"elsewhere": True}
LATER: dict[str, Any] = {"later": True}


def operational(default: Any = ..., **constraints: Any) -> Any:
    """A field that cannot change rows and so is not part of any key."""
    return Field(default, json_schema_extra=OPERATIONAL, **constraints)


def elsewhere(default: Any = ..., **constraints: Any) -> Any:
    """A field that is in keys, but not where it is written: a property of `RunConfig` collects it from there."""
    return Field(default, json_schema_extra=ELSEWHERE, **constraints)


def later(default: Any = None, **constraints: Any) -> Any:
    """A field that was added after runs had been recorded: in keys only where it differs from its default.

    The default must be what was done before there was the field. So work of older stores is still found, and a feature
    that is off leaves no trace.
    """
    return Field(default, json_schema_extra=LATER, **constraints)


def is_operational(field: FieldInfo) -> bool:
    """Tell whether a field cannot change rows."""
    return _has_mark(field, "operational")


def is_elsewhere(field: FieldInfo) -> bool:
    """Tell whether a field is in keys under the property that collects it, and not where it is written."""
    return _has_mark(field, "elsewhere")


def in_key(field: FieldInfo, value: Any) -> bool:
    """Tell whether a field with this value is part of its section's share of a key."""
    if _has_mark(field, "later"):
        return bool(value != field.default)
    return not is_operational(field) and not is_elsewhere(field)


def _has_mark(field: FieldInfo, mark: str) -> bool:
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get(mark))


class Section(BaseModel):
    """A frozen part of the config that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def section_types(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a field of this annotation may hold, itself or as items of a list."""
    annotation = plain_annotation(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (tuple, Union, UnionType):
        return [model for argument in get_args(annotation) for model in section_types(argument)]
    return []


def plain_annotation(annotation: Any) -> Any:
    """Return the type that an annotation with metadata is about; any other annotation as it is."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation

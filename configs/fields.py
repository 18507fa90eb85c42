"""The base model of all sections of a config, and the marks of fields: what is part of keys, what names a function.

A section that names a function by import path has two fields: the path, and beside it one made by `version_of`. Nothing
is imported here: who resolves a config says what the versions are.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


def operational(default: Any = ..., **constraints: Any) -> Any:
    """A field that cannot change rows and so is not part of any key."""
    return Field(default, json_schema_extra={"operational": True}, **constraints)


def elsewhere(default: Any = ..., **constraints: Any) -> Any:
    """A field that is in keys, but not where it is written: a property of `RunConfig` collects it from there."""
    return Field(default, json_schema_extra={"elsewhere": True}, **constraints)


def later(default: Any = None, **constraints: Any) -> Any:
    """A field that was added after runs had been recorded: in keys only where it differs from its default.

    The default must be what was done before there was the field. So work of older stores is still found, and a feature
    that is off leaves no trace.
    """
    return Field(default, json_schema_extra={"later": True}, **constraints)


def version_of(field: str) -> Any:
    """A field for the version of the code of the function that `field` names; filled in when resolved."""
    return Field("", json_schema_extra={"version_of": field})


def is_operational(field: FieldInfo) -> bool:
    """Tell whether a field cannot change rows."""
    return bool(_mark(field, "operational"))


def is_elsewhere(field: FieldInfo) -> bool:
    """Tell whether a field is in keys under the property that collects it, and not where it is written."""
    return bool(_mark(field, "elsewhere"))


def in_key(field: FieldInfo, value: Any) -> bool:
    """Tell whether a field with this value is part of its section's share of a key."""
    if _mark(field, "later"):
        return bool(value != field.default)
    return not is_operational(field) and not is_elsewhere(field)


def _mark(field: FieldInfo, mark: str) -> Any:
    # pydantic takes a function there as well, which is no mark of ours.
    return field.json_schema_extra.get(mark) if isinstance(field.json_schema_extra, dict) else None


class Section(BaseModel):
    """A frozen part of the config that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def meanings(section: type[BaseModel]) -> dict[str, str]:
    """Return what the fields of a section mean, by name: the docstrings below them, those of its bases included."""
    # Read when somebody asks: pydantic would parse all sections whenever they are imported, a tenth of a second.
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
            assert isinstance(definition, ast.ClassDef)
            for field, text in pairwise(definition.body):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    match text:
                        case ast.Expr(ast.Constant(str(meaning))):
                            found[field.target.id] = inspect.cleandoc(meaning)
    return found


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


@dataclass(frozen=True)
class ImportedFunction:
    """A function that a config names."""

    key: str
    """Dotted key of the import path, such as `environments.0.algorithm.function`."""
    version_key: str
    """Dotted key of the field that holds the version of its code."""
    path: str
    """The import path, `package.module:function`."""
    version: str
    """The version as it stands there; empty is open."""

    @property
    def stage(self) -> str:
        """Name of the stage that calls the function."""
        section = self.key.partition(".")[0]
        return section if section in ("training", "filtering") else "advantage"


def imported_functions(config: BaseModel, where: str = "") -> Iterator[ImportedFunction]:
    """Yield every function that a config, or a section of it at dotted key `where`, names; an empty path is none."""
    for name, field in type(config).model_fields.items():
        if of := _mark(field, "version_of"):
            if path := getattr(config, of):
                yield ImportedFunction(f"{where}{of}", where + name, path, getattr(config, name))
            continue  # a version is text: there is no section inside
        value = getattr(config, name)
        for key, each in enumerate(value) if isinstance(value, tuple) else [("", value)]:
            if isinstance(each, BaseModel):
                yield from imported_functions(each, f"{where}{name}.{key}." if key != "" else f"{where}{name}.")

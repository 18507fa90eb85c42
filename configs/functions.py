"""Functions that a config names by import path, and the versions of their code, which are part of keys.

A section with such a function has two fields: the path, and beside it one made by `version_of`. Nothing is imported
here: who resolves a config says what the versions are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

VERSION_OF = "version_of"


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


def version_of(field: str) -> Any:
    """A field for the version of the code of the function that `field` names; filled in when resolved."""
    return Field("", json_schema_extra={VERSION_OF: field})


def imported_functions(config: BaseModel, where: str = "") -> Iterator[ImportedFunction]:
    """Yield every function that a config, or a section of it at dotted key `where`, names; an empty path is none."""
    for name, field in type(config).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and (of := extra.get(VERSION_OF)):
            if path := getattr(config, str(of)):
                yield ImportedFunction(f"{where}{of}", where + name, path, getattr(config, name))
            continue
        value = getattr(config, name)
        for key, each in enumerate(value) if isinstance(value, tuple) else [("", value)]:
            if isinstance(each, BaseModel):
                yield from imported_functions(each, f"{where}{name}.{key}." if key != "" else f"{where}{name}.")


def with_versions(tree: dict[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
    """Return a config as plain JSON values with versions set, by the dotted key of their fields; `tree` is edited."""
    for key, version in versions.items():
        *sections, name = key.split(".")
        place: Any = tree
        for section in sections:
            place = place[int(section)] if isinstance(place, list) else place[section]
        place[name] = version
    return tree

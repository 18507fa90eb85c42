"""Paths of a config that lie inside its store: recorded relative to the store, so that a store can be moved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from configs.fields import Section, is_operational
from configs.run import RunConfig

STORE = "{store}/"
"""The beginning of a recorded path that lies inside the store."""
SectionT = TypeVar("SectionT", bound=Section)
PATHS = ("path", "tokenizer")
"""Operational fields that name a directory or file: weights, tokenizers, teachers, demonstrations."""


def relative_paths(config: RunConfig, root: Path | None) -> RunConfig:
    """Return the config as it is recorded in the store at `root`; unchanged where that is None, an object store."""
    if root is None:
        return config
    place = root.resolve()

    def relative(path: str) -> str:
        real = Path(path).expanduser().resolve()
        return f"{STORE}{real.relative_to(place).as_posix()}" if path and real.is_relative_to(place) else path

    return _with_paths(config, relative)


def absolute_paths(config: RunConfig, root: Path | None) -> RunConfig:
    """Return a recorded config with `store` and the paths inside it as they are now, where the store is `root`.

    Earlier versions recorded absolute paths: what follows the recorded store in one is looked for below `root`.
    """
    if root is None:
        return config
    recorded = tuple(part for part in Path(config.store).expanduser().parts if part != "..")

    def absolute(path: str) -> str:
        if path.startswith(STORE):
            return str(root / path.removeprefix(STORE))
        parts = Path(path).parts
        for end in range(len(parts) - 1, 0, -1):
            if parts[max(0, end - len(recorded)) : end] == recorded and root.joinpath(*parts[end:]).exists():
                return str(root.joinpath(*parts[end:]))
        return path

    return _with_paths(config, lambda path: absolute(path) if path.startswith(("/", STORE)) else path).model_copy(
        update={"store": str(root)}
    )


def _with_paths(section: SectionT, change: Callable[[str], str]) -> SectionT:
    updates: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name in PATHS and is_operational(field) and isinstance(value, str):
            updates[name] = change(value)
        elif isinstance(value, Section):
            updates[name] = _with_paths(value, change)
        elif isinstance(value, tuple) and any(isinstance(item, Section) for item in value):
            updates[name] = tuple(_with_paths(item, change) if isinstance(item, Section) else item for item in value)
    return section.model_copy(update=updates)

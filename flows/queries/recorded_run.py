"""Reads the config that a run of a store was recorded with."""

from collections.abc import Iterator, Mapping
from typing import Any

from configs.errors import ConfigError
from configs.load import from_json
from configs.run import RunConfig
from storage.keys import canonical_json
from storage.store import Store


def recorded_config(store: Store, name: str) -> RunConfig | None:
    """Return the config that the run `name` used last; None where the store has no such run."""
    if not name or name not in store.runs.names():
        return None
    return from_json(canonical_json(store.runs.config(name)))


def recorded_run(store: Store, name: str) -> tuple[str, RunConfig]:
    """Return the name and config of a recorded run, `latest` for the newest. Raises ConfigError otherwise."""
    run = store.runs.latest() if name == "latest" else name
    config = recorded_config(store, run or "")
    if run is None or config is None:
        raise ConfigError([f"store {store.root.address}: there is no run {name!r}; {store.runs.similar_names(name)}"])
    return run, config


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a config by dotted key."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    if not isinstance(value, (Mapping, list)):
        yield key, value
    for name, item in items:
        yield from flat(item, f"{key}.{name}" if key else str(name))

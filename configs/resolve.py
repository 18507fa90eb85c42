"""Fills in what a config leaves open, so that the recorded config says everything that may change rows."""

import secrets
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from configs.errors import ConfigError, differing_parts
from configs.fields import imported_functions
from configs.run import RunConfig

OPEN: Mapping[str, Mapping[str, Any]] = {
    "engine": {"version": "", "dtype": "auto"},
    "training": {
        "version": "",
        **dict.fromkeys(("dtype", "device", "gradient_checkpointing", "logprob_chunk"), "auto"),
    },
    "model": {"renderer": "", "tokenizer_digest": "", "vocab_size": 0},
}
"""Fields that may be filled in, by section, with the value that means open."""


def resolve(config: RunConfig, versions: Mapping[str, Any] | None = None) -> RunConfig:
    """Return `config` with its open fields filled; what is given already stays as it is.

    `versions` holds what the caller found here: `{"engine": {"version": ...}, "training": {...}, "model": {...},
    "environments": {name: {"version": ...}}, "functions": {key of the import path: version},
    "teachers": {key of the section: version}, "seed": int, "now": datetime}`, each of them optional. A null seed is
    drawn, an empty name is made from the kind and the time.
    """
    versions = versions or {}
    now = versions.get("now") or datetime.now(UTC)
    updates: dict[str, Any] = {
        "seed": config.seed if config.seed is not None else versions.get("seed", secrets.randbits(31)),
        "name": config.name or f"{config.kind}-{now.astimezone(UTC):%Y%m%d-%H%M%S}",
    }
    for section, fields in OPEN.items():
        current = getattr(config, section)
        updates[section] = current.model_copy(update=_fill(current, versions.get(section, {}), fields))
    functions = versions.get("functions", {})
    opened = {each.version_key: functions.get(each.key, "") for each in imported_functions(config) if not each.version}
    opened |= {f"{where}.version": version for where, version in versions.get("teachers", {}).items()}
    for where, entry in config.served_environments.items():
        filled = _fill(entry, versions.get("environments", {}).get(entry.name, {}), {"version": ""})
        opened |= {f"{where}.{name}": value for name, value in filled.items()}
    return with_versions(config.model_copy(update=updates), opened)


def reopen_versions(config: RunConfig, stages: Collection[str]) -> RunConfig:
    """Return `config` with the versions of imported functions open again, for the stages that call them."""
    return with_versions(config, {each.version_key: "" for each in imported_functions(config) if each.stage in stages})


def with_versions(config: RunConfig, versions: Mapping[str, str]) -> RunConfig:
    """Return `config` with versions set, by the dotted key of their fields."""
    tree = config.model_dump(mode="json")
    for key, version in versions.items():
        *sections, name = key.split(".")
        place: Any = tree
        for section in sections:
            place = place[int(section)] if isinstance(place, list) else place[section]
        place[name] = version
    # Validated again, because a copy with updates takes any value.
    return RunConfig.model_validate(tree)


def require_agreement(config: RunConfig, versions: Mapping[str, Any]) -> None:
    """Raise ConfigError where a recorded version of an engine, learner, environment or imported function is another one
    on this machine.

    The versions are in the keys: rows made by another version under the recorded name would be taken for the same.
    """
    found = {name: versions.get(name, {}) for name in ("engine", "training", "environments", "functions")}
    triples = [
        (f"{name}.version", getattr(config, name).version, found[name].get("version"))
        for name in ("engine", "training")
    ]
    triples += [
        (each.version_key, each.version, found["functions"].get(each.key)) for each in imported_functions(config)
    ]
    lines = [
        f"{key}: recorded as {recorded!r}, here it is {here!r}; install that version, or start a new run with "
        f"{key}={here!r}"
        for key, recorded, here in triples
        # An open one is filled in, and of one that is not here (a replay without engine) nothing is known.
        if recorded and here and here != recorded
    ]
    here = {name: each.get("version", "") for name, each in found["environments"].items()}
    if lines := [*lines, *edited_environments(config, here)]:
        raise ConfigError(lines)


def edited_environments(config: RunConfig, here: Mapping[str, str]) -> list[str]:
    """Return a line for each environment whose recorded version is not the one that its name has in `here`."""
    scores = f"; where rewards alone changed, score what is recorded again: stagecoach replay {config.name} --regrade"
    if config.kind == "evaluate":  # which has no steps to go through again
        scores = ""
    return [
        f"{where}.version: the code of environment {each.name!r} is not what run {config.name!r} began "
        f"with: recorded as {old}, here it is {new}. Bring that code back, or start a new run: its examples and "
        f"rollouts are computed again{scores}"
        for where, each in config.served_environments.items()
        if each.version and (found := here.get(each.name)) and found != each.version
        for old, new in [differing_parts(each.version, found)]
    ]


def _fill(section: Any, found: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(found) - set(fields)
    assert not unknown, f"versions {sorted(unknown)} of {type(section).__name__} are not fields that may be filled in"
    # What stands there already was given, or recorded by the run that goes on.
    return {name: value for name, value in found.items() if getattr(section, name) == fields[name]}

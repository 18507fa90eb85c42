"""Fills in what a config leaves open, so that the recorded config says everything that may change rows."""

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from configs.errors import ConfigError
from configs.run import RunConfig

OPEN: Mapping[str, Mapping[str, Any]] = {
    "engine": {"version": "", "dtype": "auto"},
    "training": {"version": "", "dtype": "auto", "device": "auto"},
    "model": {"renderer": "", "tokenizer_digest": "", "vocab_size": 0},
}
"""Fields that facts may fill, by section, with the value that means open."""


def resolve(config: RunConfig, facts: Mapping[str, Any] | None = None) -> RunConfig:
    """Return `config` with its open fields filled; what is given already stays as it is.

    `facts` holds what the caller found out: `{"engine": {"version": ...}, "training": {...}, "model": {...},
    "environments": {name: {"version": ...}}, "seed": int, "now": datetime}`, each of them optional. A null seed is
    drawn, an empty name is made from the kind and the time.
    """
    facts = facts or {}
    now = facts.get("now") or datetime.now(UTC)
    updates: dict[str, Any] = {
        "seed": config.seed if config.seed is not None else facts.get("seed", secrets.randbits(31)),
        "name": config.name or f"{config.kind}-{now.astimezone(UTC):%Y%m%d-%H%M%S}",
        "environments": tuple(
            item.model_copy(update=_filled(item, facts.get("environments", {}).get(item.name, {}), {"version": ""}))
            for item in config.environments
        ),
    }
    for section, fields in OPEN.items():
        current = getattr(config, section)
        updates[section] = current.model_copy(update=_filled(current, facts.get(section, {}), fields))
    # Validated again, because a copy with updates takes any value.
    return RunConfig.model_validate(config.model_copy(update=updates).model_dump(mode="json"))


def require_agreement(config: RunConfig, facts: Mapping[str, Any]) -> None:
    """Raise ConfigError where a recorded engine, learner or environment version is another one on this machine.

    The versions are in the keys: rows made by another version under the recorded name would be taken for the same.
    """
    pairs = [(section, getattr(config, section).version, facts.get(section, {})) for section in ("engine", "training")]
    pairs += [
        (f"environments.{index}", item.version, facts.get("environments", {}).get(item.name, {}))
        for index, item in enumerate(config.environments)
    ]
    lines = [
        f"{where}.version: recorded as {recorded!r}, here it is {found['version']!r}; install that version, or start a "
        f"new run with {where}.version={found['version']!r}"
        for where, recorded, found in pairs
        if recorded and found.get("version") and found["version"] != recorded
    ]
    if lines:
        raise ConfigError(lines)


def _filled(section: Any, found: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(found) - set(fields)
    assert not unknown, f"facts {sorted(unknown)} of {type(section).__name__} are not fields that may be filled in"
    return {name: value for name, value in found.items() if getattr(section, name) == fields[name]}

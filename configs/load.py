"""Puts a run's config together: TOML files from left to right, then dotted overrides; and records it as JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.checks.run import require
from configs.errors import ConfigError
from configs.explain import Source, explain
from configs.former_keys import recorded, translate
from configs.layers import Draft, read, unwritable
from configs.run import RunConfig


def load(
    files: Sequence[Path | str] = (), overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> RunConfig:
    """Return the config of `files`, which may be names of presets, and of `overrides` such as `steps=5`.

    `base` is a recorded config to start from instead of the defaults. Raises ConfigError with everything that is
    wrong: unknown keys and wrong types first, then what does not fit together.
    """
    draft = Draft(RunConfig().model_dump(mode="json"))
    if base is not None:
        base = dict(base)
        recorded(base)
        draft.merge(base, "recorded config")
    for file in files:
        draft.merge(*read(file))
    misplaced = _override(draft, overrides)
    translate(draft.tree)
    return require(_validated(draft.tree, draft.source, misplaced))


def dump(config: RunConfig) -> str:
    """Return `config` as canonical JSON: the same config is the same text."""
    return json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> RunConfig:
    """Return the config that `dump` recorded. Raises ConfigError where it is of another layout."""
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError([f"the recorded config is not JSON: {error}"]) from error
    if isinstance(tree, dict):
        recorded(tree)
    return _validated(tree, lambda location: "recorded config")


def _override(draft: Draft, overrides: Sequence[str]) -> list[str]:
    problems: list[str] = []
    for override in overrides:
        try:
            draft.override(override)
        except ConfigError as error:
            problems += error.problems
    return problems


def _validated(tree: Any, source: Source, problems: Sequence[str] = ()) -> RunConfig:
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError([*problems, *explain(error, RunConfig, source)]) from error
    if problems or unwritable(tree):
        raise ConfigError([*problems, *unwritable(tree)])
    return config

"""Values on their way to one config: files and overrides merged from left to right, each value with its origin.

Keys of configs that were written for earlier layouts are translated here, where they are still understood.
"""

import json
import tomllib
import warnings
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from datetime import date, time
from math import isfinite
from pathlib import Path
from typing import Any

from configs.errors import ConfigError, did_you_mean

PRESETS = Path(__file__).parent / "presets"
Location = tuple[str | int, ...]
REMOVED_KEYS = {
    "async_level": "rollout.max_off_policy_steps bounds how old a rollout may be",
    "max_async_level": "rollout.max_off_policy_steps bounds how old a rollout may be",
    "max_steps": "it is `steps`",
    "environments.*.args": "settings of an environment nest under `taskset` and `harness`",
    "environments.*.id": "the package is named by `taskset.id`",
    "training.loss_type": "it is `training.loss.type`",
    "assignment.batch_size": "it is `assignment.groups_per_step` times `assignment.group_size`",
    "rollout.adaptive_in_flight": "`rollout.max_in_flight` is the limit; `engine.metrics` counts preemptions",
    "tracking.branches": "a replay is a W&B run of its own, in the group of the recorded run",
    "prefect.service_logs": "what services write is in the files of logs/RUN in the store",
    "engine.port": "the operating system chooses; `engine.url` names an engine that someone else runs",
}
"""What replaces each, or why it is gone, by dotted key; `*` stands for the place in a list."""


class Draft:
    """Plain values merged from left to right."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree: dict[str, Any] = deepcopy(dict(tree))
        self._sources: dict[Location, str] = {}

    def source(self, location: Location) -> str:
        """Return where the value at `location`, or else what is nearest to it, came from; empty for a default."""
        # First what is around it, for whole tables and lists are laid down at once; then what was set inside.
        for length in range(len(location), 0, -1):
            if location[:length] in self._sources:
                return self._sources[location[:length]]
        return next((self._sources[deeper] for deeper in self._inside(location)), "")

    def merge(self, tree: Mapping[str, Any], source: str) -> None:
        """Lay `tree` over what is there: tables are merged, lists and values replaced."""
        for key, value in tree.items():
            self._set(self.tree, key, value, (), source)

    def override(self, text: str) -> None:
        """Set one value from `dotted.key=value`; the value is TOML, `null`, or else a bare string.

        Raises ConfigError where the text has no `=`, or leads into a list or value that is not there.
        """
        dotted, equals, value = text.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError([f"{text}: an override is written dotted.key=value"])
        source = f"override {text}"
        node: Any = self.tree
        location: Location = ()
        for key in keys[:-1]:
            item, location = self._enter(node, key, location, source)
            node = node[item]
        self._set(node, self._index(node, keys[-1], location, source), parse(value.strip()), location, source)

    def _set(self, node: Any, key: str | int, value: Any, location: Location, source: str) -> None:
        here = (*location, key)
        current = node.get(key) if isinstance(node, dict) else node[key]
        if isinstance(value, Mapping) and isinstance(current, dict) and not _switches(current, value):
            for name, item in value.items():
                self._set(current, name, item, here, source)
            return
        if key == "type" and isinstance(node, dict) and current not in (None, value):
            # Another kind of thing: the fields of the old kind mean nothing to it.
            node.clear()
        node[key] = deepcopy(value)
        self._sources[here] = source
        # What was set inside of the old value went with it.
        for deeper in self._inside(here):
            del self._sources[deeper]

    def _inside(self, location: Location) -> list[Location]:
        depth = len(location)
        return [known for known in self._sources if len(known) > depth and known[:depth] == location]

    def _enter(self, node: Any, key: str, location: Location, source: str) -> tuple[str | int, Location]:
        item = self._index(node, key, location, source)
        # A section that is off, and null, comes into being by the first setting in it.
        if isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        return item, (*location, item)

    def _index(self, node: Any, key: str, location: Location, source: str) -> str | int:
        if isinstance(node, dict):
            return key
        where = dotted_key(location)
        if not isinstance(node, list):
            raise ConfigError([f"{where}.{key}: {where} is a value and has no keys ({source})"])
        if key.isdecimal() and int(key) < len(node):
            return int(key)
        entries = f"{len(node)} of them, numbered from 0" if node else "no entries"
        raise ConfigError([f"{where}.{key}: {where} has {entries} ({source})"])


def _switches(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "type" in new and "type" in old and new["type"] != old["type"]


def dotted_key(location: Location) -> str:
    """Return a location as one writes it in an override."""
    return ".".join(str(part) for part in location)


def parse(text: str) -> Any:
    """Return the value that an override's text stands for: TOML, `null`, a section as JSON, or else the text itself."""
    if text == "null":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # a TOMLDecodeError, or a number of more digits than Python reads
        if text.startswith("{"):  # a section, written as JSON
            with suppress(ValueError):
                return json.loads(text)
        return text  # so that paths and names need no quotes of their own within those of a shell


def read(file: Path | str) -> tuple[dict[str, Any], str]:
    """Return the tables of a TOML file, or of a preset by its bare name, and what to call it in messages.

    A preset's table `demo` is left out: it is no section of a config. Raises ConfigError where there is
    no such file or preset, or where it is not TOML.
    """
    path = find(file)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        if path.parent == PRESETS:
            tables.pop("demo", None)
        return tables, str(file)
    except ValueError as error:
        raise ConfigError([f"{path}: not TOML: {error}"]) from error
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error


def find(file: Path | str) -> Path:
    """Return the path of a config file: `file` itself, or the preset of that bare name. Raises ConfigError."""
    path = Path(file).expanduser()
    if path.is_file():
        return path
    preset = PRESETS / f"{file}.toml"
    # A path that is not there is a mistake, even where its last part is the name of a preset.
    if path.name == str(file) and preset.is_file():
        return preset
    known = f"the presets are {', '.join(presets())}{did_you_mean(str(file), presets())}"
    raise ConfigError([f"{file}: no such file, and no such preset; {known}"])


def presets(kind: str = "") -> list[str]:
    """Return the names of the presets; with `kind`, of those for runs of that kind."""
    every = sorted(PRESETS.glob("*.toml"))
    return [path.stem for path in every if not kind or tomllib.loads(path.read_text("utf-8"))["kind"] == kind]


def json_problems(value: Any, location: Location = ()) -> list[str]:
    """Return a line for each value that JSON has no form for, so that it could not be recorded and read back."""
    if isinstance(value, Mapping):
        return [line for key, item in value.items() for line in json_problems(item, (*location, key))]
    if isinstance(value, list):
        return [line for index, item in enumerate(value) for line in json_problems(item, (*location, index))]
    if isinstance(value, float) and not isfinite(value):
        return [f"{dotted_key(location)}: {value} is not a finite number"]
    if isinstance(value, (date, time)):
        return [f"{dotted_key(location)}: {value} is read as a date or time; put it in quotes"]
    return []


def translate(tree: dict[str, Any]) -> None:
    """Rename old keys that are still understood to those of today, in place, with a warning for each.

    `num_workers` of an environment: a number is a static pool of that many, "auto" an elastic one; a pool that is given
    wins over it.
    """
    environments = tree.get("environments")
    for index, environment in enumerate(environments if isinstance(environments, list) else []):
        if isinstance(environment, dict) and "num_workers" in environment:
            _translate_num_workers(environment, f"environments.{index}")
    _translate_advantage(tree)


def translate_recorded(tree: dict[str, Any]) -> None:
    """Translate a recorded config in place, without warnings: nobody can rewrite it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        translate(tree)
    if isinstance(rollout := tree.get("rollout"), dict):
        rollout.pop("adaptive_in_flight", None)  # it changed no rows
    wandb = tree.pop("wandb", None)  # the former name of the section `tracking`
    if isinstance(wandb, dict) and wandb.get("mode") != "disabled":
        tree["tracking"] = {"type": "wandb"} | wandb
    tree.get("tracking", {}).pop("branches", None)
    prefect = tree.get("prefect", {})
    prefect.pop("service_logs", None)
    if prefect.get("tasks") == "steps":  # for which a run has lines in its log now
        prefect["tasks"] = "none"


def _translate_advantage(tree: dict[str, Any]) -> None:
    old = tree.pop("advantage", None)
    if not isinstance(old, dict):
        return
    current = tree.get("algorithm") or {}
    # The defaults of another algorithm mean nothing to this one.
    switched = old.get("type", current.get("type")) != current.get("type")
    tree["algorithm"] = old if switched else current | old
    warnings.warn("advantage is deprecated: the section is called algorithm", FutureWarning, stacklevel=4)


def _translate_num_workers(environment: dict[str, Any], where: str) -> None:
    workers = environment.pop("num_workers")
    pool: Mapping[str, Any] = {"type": "elastic"} if workers == "auto" else {"type": "static", "num_workers": workers}
    environment.setdefault("pool", dict(pool))
    warnings.warn(
        f"{where}.num_workers is deprecated: write {where}.pool = {environment['pool']}", FutureWarning, stacklevel=4
    )


def removed_key(key: str) -> str | None:
    """Return what replaces a key that is gone, or why it is gone; None where there never was one of that name."""
    pattern = ".".join("*" if part.isdecimal() else part for part in key.split("."))
    return REMOVED_KEYS.get(pattern)

"""translate: what other trainers were given becomes settings of RunConfig, by one TOML table for each trainer.

A table names settings here by the keys there (`keys`), other words for values (`values`), values with which a key says
what always holds here (`same`), the trainer's defaults (`defaults`), and what a setting brings with it (`implied`).
Files are data and never run: flows/exchange/sources.py.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from configs.checks.environments import OF_A_TASKSET
from configs.errors import ConfigError
from configs.load import load
from configs.secrets import secrets_in
from flows.exchange.sources import Unresolved, evaluate, read_keys

SAMPLE: dict[str, Any] = {
    "name": "my_data",
    "taskset": {"id": "own_data", "path": "examples.jsonl", "task": {"scoring": "my_reward:reward"}},
    "max_turns": 1,
}
"""The environment of a config that names none: rows of a file, and a reward function."""
SCORING = "environments.0.taskset.task.scoring"
NAME = re.compile(r"(evaluation\.)?environments\.[\w-]+\.name")
"""The key of an environment's name."""
MAX_CHARS = 10_000_000
"""Longest text of a file."""
TRAINERS = ("trl", "prime_rl", "verl", "openrlhf")
TABLES = [tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text("utf-8")) for name in TRAINERS]


@dataclass
class Translation:
    """The settings that a config of another trainer becomes, which load, and the keys that became none."""

    table: Mapping[str, Any]
    """The trainer's table."""
    keys: Mapping[str, Any]
    """The values there by dotted key, without those left to their defaults."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Values by dotted key; an item of a list has its number."""
    origins: dict[str, list[str]] = field(default_factory=dict)
    """Keys there, by the dotted key of the setting; none of a default."""
    problems: list[str] = field(default_factory=list)
    """Settings that do not load, each with its reason."""

    def origin(self, setting: str) -> str:
        """Return the keys that a setting came from with their values, or that it is a default, or goes with others."""
        names = [f"{name} = {one_line(self.keys[name])}" for name in self.origins.get(setting, ())]
        return ", ".join(names) or (f"the default of {self.table['name']}" if setting in self.origins else "with these")

    def report(self) -> dict[str, list[str]]:
        """Return lines on what was `carried` over with the value of its key, `changed`, and `lost`.

        Changed is a setting that is computed, another word for the key's value, or a default of the trainer; lost are
        keys that no setting came from, and settings that do not load.
        """
        lines: dict[str, list[str]] = {"carried": [], "changed": [], "lost": [*self.problems]}
        used = {name for names in self.origins.values() for name in names}
        for setting, value in self.settings.items():
            first, *others = self.origins.get(setting) or [""]
            is_computed = {*others} - {*self.table["only_with"].values()}
            is_carried = not is_computed and one_line(self.keys.get(first)) == one_line(value)
            text = "" if is_carried else f" = {one_line(value)}"
            lines["carried" if is_carried else "changed"].append(f"{self.origin(setting)} -> {setting}{text}")
        for name in (name for name in self.keys if name not in used):
            is_same = (value := self.keys[name]) in self.table["same"].get(name, ())
            why = ": always so here" if is_same else ": running it would tell" * isinstance(value, Unresolved)
            is_secret = any(secrets_in({"settings": {name: value}})[0])
            text = "a secret, which is not shown" if is_secret else f"{one_line(value)}{why}"
            lines["carried" if is_same else "lost"].append(f"{name} = {text}")
        return lines


def translate(files: Sequence[str]) -> Translation:
    """Return the settings of the files of one trainer, later files over earlier ones.

    Raises ConfigError for a file that cannot be read, or is of no trainer with a table, or of another than the others.
    """
    parts = [_recognise(Path(file)) for file in files]
    table, given = parts[0][0], {key: value for _, keys in parts for key, value in keys.items()}
    if any(other is not table for other, _ in parts):
        raise ConfigError([f"--from: {', '.join(files)} are of different trainers; give the files of one"])
    if not any(key.startswith(table["needs"]) for key in given):
        raise ConfigError([f"{', '.join(files)}: trains or serves alone; give the file of the orchestrator as well"])
    result = Translation(table, given)
    keys = {key: value for key, value in (table["defaults"] | given).items() if not isinstance(value, Unresolved)}
    patterns = {key: _pattern(table, key) for key in keys}
    for pattern, targets in table["keys"].items():
        for key in (key for key in keys if patterns[key] == pattern):
            for target in targets.split(", "):
                _set(result, keys, key, pattern, target)
    for section, condition in table["only_with"].items():
        for name in [name for name in result.settings if name.startswith(section)]:
            if (keys | given).get(condition):
                result.origins[name] = [*dict.fromkeys([*result.origins[name], condition])]
            else:
                del result.settings[name], result.origins[name]
    _name_rewards(result)
    for name, brought in table["implied"].items():
        setting, _, value = name.partition("=")
        values = [str(each) for key, each in result.settings.items() if _match(setting, key) is not None]
        if values and value in ("", *values):
            for new, made in brought.items():
                if str(made).startswith("="):
                    made = _evaluate(made[1:], keys | result.settings)
                if not isinstance(made, Unresolved):
                    result.settings.setdefault(new, made)
    _refer_to_trained(result)
    _drop_invalid(result)
    return result


def _name_rewards(result: Translation) -> None:
    """Let weights of reward functions be scores of own data, by the functions' names or by their places."""
    weights = result.settings.pop(SCORING, None)
    if not isinstance(weights, list) or not {type(weight) for weight in weights} <= {int, float}:
        result.origins.pop(SCORING, None)
        return
    names = re.findall(r"([A-Za-z_]\w*)['\"]?\s*(?=[],])", str(result.keys.get("reward_funcs")))
    if not len({*names}) == len(names) == len(weights):
        names = [f"reward_{place}" for place in range(len(weights))]
    scores = zip(names, weights, strict=True)
    result.settings[SCORING] = {name: {"function": f"my_reward:{name}", "weight": weight} for name, weight in scores}
    if "environments.0.taskset.hub" not in result.settings:
        result.settings["environments.0.taskset.path"] = SAMPLE["taskset"]["path"]


def _refer_to_trained(result: Translation) -> None:
    """Let evaluation environments that are trained on too be the held-out examples of those."""
    names = {key: value for key, value in result.settings.items() if NAME.fullmatch(key)}
    trained = {value: key.removesuffix("name") for key, value in names.items() if key.startswith("environments.")}
    own = [key for key, value in names.items() if key.startswith("evaluation.") and value in trained]
    for name, place in [(names[key], key.removesuffix("name")) for key in own]:
        if _below(result, f"{place}taskset.") != _below(result, f"{trained[name]}taskset."):
            result.settings[f"{place}name"] = f"{name}-eval"  # other data than that of the training
            continue
        for key in [key for key in result.settings if key.startswith(place)]:
            if key.removeprefix(place).partition(".")[0] in ("taskset", *OF_A_TASKSET):
                del result.settings[key]


def _below(result: Translation, place: str) -> dict[str, Any]:
    return {key.removeprefix(place): value for key, value in result.settings.items() if key.startswith(place)}


def _set(result: Translation, keys: Mapping[str, Any], key: str, pattern: str, target: str) -> None:
    """Set what a key is for, unless its value has no counterpart."""
    new, _, algorithm = target.partition(" if ")
    if algorithm and keys.get(key.partition(".teacher.")[0] + ".type") != algorithm:
        return
    new, _, expression = new.partition(" = ")
    value = _evaluate(expression, keys) if expression else keys[key]
    if isinstance(value, Unresolved):
        return
    value = result.table["values"].get(pattern, {}).get(str(value).lower(), value)
    if isinstance(value, str):
        value = value.removesuffix(result.table["strip"].get(target, ""))
    if value not in (None, ""):
        new = new.replace("**", "*").replace("*", "{}").format(*_match(pattern, key) or ())
        names = dict.fromkeys([key, *expression.split()])
        result.settings[new], result.origins[new] = value, [name for name in names if name in result.keys]


def _evaluate(expression: str, keys: Mapping[str, Any]) -> Any:
    """Return what an expression of keys comes to, with `up` at its end rounded up to a whole number, or Unresolved."""
    value = evaluate(expression.removesuffix(" up"), keys)
    return ceil(value) if expression.endswith(" up") and not isinstance(value, Unresolved) else value


def _match(pattern: str, key: str) -> tuple[str, ...] | None:
    """Return the parts of a key in place of `*`, which is one part, and of `**`, which is any number."""
    # Bare keys of TOML alone: a config is written with them.
    wild = re.escape(pattern).replace(r"\*\*", "([A-Za-z0-9_.-]+)").replace(r"\*", "([A-Za-z0-9_-]+)")
    match = re.fullmatch(wild, key)
    return match and match.groups()


def _pattern(table: Mapping[str, Any], key: str) -> str:
    """Return the first pattern of a table that fits a key; empty without one."""
    return next((old for old in table["keys"] if _match(old, key) is not None), "")


def _drop_invalid(result: Translation) -> None:
    """Move settings that do not load to `problems`, one problem of the config after the other."""
    settings = result.settings
    while problems := _problems(settings):
        location, reason = next(iter(problems.items()))
        near = [key for key in settings if _is_below(key, location) or location.startswith(f"{key}.")]
        for key in near or _causes(settings, location, reason):
            result.problems.append(f"{result.origin(key)} -> {key}: {reason}")
            del settings[key]


def _causes(settings: Mapping[str, Any], location: str, reason: str) -> list[str]:
    """Return the settings behind a problem of a key that is not set.

    It is the one without which nothing is wrong with a section around the key; else those that the reason names; else
    the one of the nearest section without which something else is wrong with the key; else the whole section.
    """
    causes: list[str] = []
    section = location
    while section := section.rpartition(".")[0]:
        below = [key for key in settings if _is_below(key, section)]
        changing = []
        for key in below:
            rest = _problems({other: settings[other] for other in settings if other != key})
            places = {place for place in rest if _is_below(place, section)}
            if not places:
                return [key]
            if places == {location} and rest[location] != reason:
                changing.append(key)
        causes = causes or changing[:1] or below
    return [key for key in settings if "." in key and key in reason] or causes or [*settings][-1:]


def _is_below(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")


def _problems(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return what is wrong by dotted key; environments have the numbers that they have in the settings."""
    try:
        load(base=config_of(settings))
    except ConfigError as error:
        lines = (problem.replace(" (recorded config)", "").partition(": ") for problem in error.problems)
        return {_numbered_as(settings, location): reason for location, _, reason in lines}
    return {}


def _numbered_as(settings: Mapping[str, Any], location: str) -> str:
    """Return a key of the config with the number that its environment has in the settings."""
    match = re.match(r"((?:evaluation\.)?environments\.)(\d+)", location)
    if not match:
        return location
    numbers = dict.fromkeys(key.removeprefix(match[1]).split(".")[0] for key in settings if key.startswith(match[1]))
    return f"{match[1]}{([*numbers] or ['0'])[int(match[2])]}{location[match.end() :]}"


def config_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key as nested tables, with an environment; environments are lists."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    if own := tree.get("evaluation", {}).get("environments"):
        tree["evaluation"]["environments"] = [*own.values()]
    return tree | {"environments": [*tree.get("environments", {"0": SAMPLE}).values()]}


def one_line(value: Any) -> str:
    """Return a value as JSON, in at most 80 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _recognise(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the table of the trainer whose keys a file has, and the keys; a component's have its section before them.

    Raises ConfigError.
    """
    try:
        with path.expanduser().open(encoding="utf-8") as file:
            text = file.read(MAX_CHARS + 1)
        if len(text) > MAX_CHARS:
            raise ValueError(f"longer than {MAX_CHARS} characters")
        launches = [table["launch"] for table in reversed(TABLES) if table["launch"]]
        keys = read_keys(path.suffix, text, TABLES[0]["calls"], launches)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError([f"{path}: not read: {error}. Nothing was written"]) from error
    candidates = [
        # Evaluations alone are no training.
        (sum(bool(_pattern(table, prefix + key)) for key in keys if not key.startswith("eval.")), index, prefix)
        for index, table in enumerate(TABLES)
        for prefix in table["components"]
    ]
    number, index, prefix = max(candidates, key=lambda candidate: candidate[0])
    if not number or any(key.startswith(section) for key in keys for section in TABLES[index]["refused"]):
        names = ", ".join(table["name"] for table in TABLES)
        raise ConfigError(
            [
                f"{path}: no config of {names} for reinforcement learning; its keys: {', '.join(keys)[:99]}. "
                "Nothing was written; for supervised training write one after the preset sft_demo"
            ]
        )
    return TABLES[index], {prefix + key: value for key, value in keys.items()}

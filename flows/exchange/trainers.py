"""Translates configs of other trainers: each key becomes a setting of RunConfig, or is listed with the reason.

A trainer's names are data (trl.toml, prime_rl.toml); values that are more than another name are computed in trl.py and
prime_rl.py. Files are read as data and never run.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from configs.errors import ConfigError, did_you_mean
from configs.layers import Draft
from configs.load import load
from flows.exchange import prime_rl, trl
from flows.exchange.foreign_keys import SAMPLE, ForeignKeys, NoCounterpart, matches

OFF: tuple[Any, ...] = (None, False, 0, "", "no", "none", [], {})
"""Values that ask for nothing, so that nothing is lost where their key has no counterpart."""
MAX_LISTED_KEYS = 5
"""Keys of one setting that are listed with their values."""
COMPONENTS = ("orchestrator", "trainer", "inference")
MAX_CHARS = 10_000_000
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


@dataclass(frozen=True)
class ForeignTrainer:
    """The names of another trainer's settings."""

    name: str
    keys: Mapping[str, Sequence[str]]
    """Patterns of its keys by the dotted key here that they become."""
    always: frozenset[str]
    """Settings here that are written where no key is given, because the default there is another one."""
    notes: Mapping[str, str]
    """How the meaning differs, by the dotted key here."""
    defaults: Mapping[str, Any]
    """Its defaults that settings are computed with, by key."""
    missing: Sequence[tuple[Sequence[str], str, Sequence[Any]]]
    """Patterns of keys without a counterpart, the reason, and further values that ask for nothing."""
    computed: Mapping[str, Callable[[ForeignKeys], Any]]
    """Functions of settings that are more than another name, by the dotted key here; None writes nothing."""

    @classmethod
    def read(cls, file: str, computed: Mapping[str, Callable[[ForeignKeys], Any]]) -> "ForeignTrainer":
        """Return the trainer that a TOML file beside this one describes."""
        table = tomllib.loads((Path(__file__).parent / file).read_text(encoding="utf-8"))
        missing = [(entry["keys"].split(), entry["why"], entry.get("off", ())) for entry in table["missing"]]
        keys = {new: old.split() for new, old in table["keys"].items()}
        always = frozenset(table["always"].split())
        return cls(table["name"], keys, always, table["notes"], table["defaults"], missing, computed)

    @property
    def patterns(self) -> list[str]:
        """Every key of the table."""
        lists = [*self.keys.values(), *(old for old, _, _ in self.missing)]
        return [pattern for old in lists for pattern in old]


TRL = ForeignTrainer.read("trl.toml", trl.COMPUTED)
PRIME_RL = ForeignTrainer.read("prime_rl.toml", prime_rl.COMPUTED)


@dataclass
class Translation:
    """The settings that a foreign config becomes, which load, and the keys that became none."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Values by dotted key."""
    origins: dict[str, str] = field(default_factory=dict)
    """Keys there with their values, by the dotted key of the setting."""
    lost: dict[str, str] = field(default_factory=dict)
    """Reasons by the keys there, with their values."""
    off: list[str] = field(default_factory=list)
    """Keys without a counterpart whose value asks for nothing."""


def translate(tree: Mapping[str, Any], trainer: ForeignTrainer) -> Translation:
    """Return the settings of a foreign config; what is unknown or invalid here is listed in `lost`."""
    keys = ForeignKeys(tree, trainer.defaults)
    result = Translation()
    for new, patterns in trainer.keys.items():
        used = [key for pattern in patterns for key in keys if matches(key, pattern)]
        if not used and new not in trainer.always:
            continue
        origin = _list_keys(keys, used) or f"{patterns[0]} (the default of {trainer.name})"
        try:
            value = trainer.computed[new](keys) if new in trainer.computed else keys.first(*(used or patterns))
        except NoCounterpart as problem:
            result.lost[origin] = str(problem)
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:  # of a type it cannot have
            result.lost[origin] = f"not understood: {error}"
        else:
            if value is not None:
                result.settings[new], result.origins[new] = deepcopy(value), origin
    result.settings.setdefault("environments", SAMPLE)  # a config without any does not load
    result.origins.setdefault("environments", "none could be read")
    _drop_invalid(result)
    _list_others(result, keys, trainer)
    return result


def tree_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key as the nested tables of a config."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def one_line(value: Any) -> str:
    """Return a value as JSON, in at most 80 characters; of environments the names."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "name" in item for item in value):
        value = [item["name"] for item in value]
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _list_keys(keys: ForeignKeys, names: Sequence[str]) -> str:
    """Return keys with their values; of a whole section, which has too many, the first and a count."""
    if len(names) > MAX_LISTED_KEYS:
        return f"{names[0]} and {len(names) - 1} more"
    return ", ".join(f"{name} = {one_line(keys[name])}" for name in names)


def _drop_invalid(result: Translation) -> None:
    """Move settings that do not load to `lost`, one problem of the config after the other."""
    settings = result.settings
    while problem := _first_problem(settings):
        location, _, why = problem.partition(": ")
        key = next((key for key in settings if matches(location, key) or matches(key, location)), "")
        if not key or (key == "environments" and settings[key] == SAMPLE):
            # The problem names a key that is not set: the setting without which another problem is first.
            others = [key for key in settings if key != "environments"]
            rest = {key: {name: settings[name] for name in settings if name != key} for key in others}
            key = next((key for key in others if _first_problem(rest[key]) != problem), others[-1])
        result.lost[f"{result.origins[key]} -> {location}"] = why.replace(" (recorded config)", "")
        _delete(settings, key, location.removeprefix(key).split(".")[1:] if matches(location, key) else ())
        settings["environments"] = settings.get("environments") or SAMPLE


def _delete(parent: Any, name: Any, path: Sequence[str]) -> None:
    """Delete the value at `path` below `parent[name]`, or the last one on the way that exists."""
    for part in path:
        inner = parent[name]
        try:
            step = int(part) if isinstance(inner, list) else part
            inner[step]
        except (KeyError, IndexError, TypeError, ValueError):
            break
        parent, name = inner, step
    del parent[name]


def _first_problem(settings: Mapping[str, Any]) -> str:
    try:
        load(base=tree_of(settings))
    except ConfigError as error:
        return error.problems[0]
    return ""


def _list_others(result: Translation, keys: ForeignKeys, trainer: ForeignTrainer) -> None:
    """List the keys that no setting came from, those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for key, value in keys.items():
        pattern = max((old for old in trainer.patterns if matches(key, old)), key=len, default="")
        if any(pattern in patterns for patterns in trainer.keys.values()):
            continue
        unknown = f"no key of {trainer.name} that is known here{did_you_mean(key, trainer.patterns)}"
        why, off = next(((why, off) for patterns, why, off in trainer.missing if pattern in patterns), (unknown, ()))
        if pattern and _asks_for_nothing(value, off):
            result.off.append(key)
        else:
            by_reason.setdefault(why, []).append(key)
    for why, names in by_reason.items():
        many = len(names) > MAX_LISTED_KEYS
        result.lost[", ".join(names) if many else _list_keys(keys, names)] = why


def _asks_for_nothing(value: Any, off: Sequence[Any]) -> bool:
    return any(value == nothing and isinstance(value, bool) == isinstance(nothing, bool) for nothing in (*OFF, *off))


def read_foreign(files: Sequence[str]) -> tuple[ForeignTrainer, dict[str, Any]]:
    """Return the trainer of the files and their keys as nested tables, later files over earlier ones.

    Raises ConfigError for a file that cannot be read, is of no known trainer, or of another trainer than the others.
    """
    merged, trainers = Draft({}), []
    for file in files:
        trainer, tree = _read(Path(file))
        merged.merge(tree, file)
        trainers.append(trainer)
    if any(trainer is not trainers[0] for trainer in trainers):
        origins = ", ".join(f"{file} of {trainer.name}" for file, trainer in zip(files, trainers, strict=True))
        raise ConfigError([f"--from: the files are of different trainers: {origins}; give those of one"])
    if set(merged.tree) == {"inference"}:
        raise ConfigError(
            [f"{', '.join(files)}: serves a model and trains none; give the file of the orchestrator as well"]
        )
    return trainers[0], merged.tree


def _read(path: Path) -> tuple[ForeignTrainer, dict[str, Any]]:
    try:
        with path.expanduser().open(encoding="utf-8") as file:
            text = file.read(MAX_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"]) from error
    if len(text) > MAX_CHARS:
        raise ConfigError([f"{path}: is longer than {MAX_CHARS:,} characters, so it is no config; nothing was written"])
    tree = _parse(path, text)
    _refuse_other_programs(path, tree)
    # A file of prime-rl for one component has the keys of that section in the file for all.
    sections = [{name: tree} for name in COMPONENTS]
    candidates = [(TRL, tree), *((PRIME_RL, tables) for tables in (tree, *sections))]
    trainer, tables = max(candidates, key=lambda candidate: _num_keys(*candidate))
    if not _num_keys(trainer, tables):
        raise ConfigError(
            [
                f"{path}: its keys are neither prime-rl's ([orchestrator], [trainer], [inference]) nor arguments of "
                f"TRL's GRPOConfig; they are {', '.join(list(tree)[:8]) or 'none'}"
            ]
        )
    return trainer, tables


def _num_keys(trainer: ForeignTrainer, tree: Mapping[str, Any]) -> int:
    """Return how many keys are the trainer's."""
    patterns = [pattern for pattern in trainer.patterns if pattern not in COMPONENTS]
    keys = ForeignKeys(tree, {})
    return sum(any(matches(key, pattern) for pattern in patterns) for key in keys)


def _parse(path: Path, text: str) -> dict[str, Any]:
    parsers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads, ".sh": _arguments}
    parsers |= {".yaml": _yaml, ".yml": _yaml}
    if path.suffix not in parsers:
        raise ConfigError(
            [
                f"{path}: want a file that ends in .toml, .yaml, .json or .sh; of a script give the arguments of its "
                "GRPOConfig as YAML, or the command that starts it as .sh"
            ]
        )
    try:
        tree = parsers[path.suffix](text)
    except Exception as error:  # whatever a parser raises, RecursionError among it
        raise ConfigError([f"{path}: not {path.suffix[1:].upper()}: {error}"]) from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError([f"{path}: names with values are wanted, this is {type(tree).__name__}"])
    return tree


def _refuse_other_programs(path: Path, tree: Mapping[str, Any]) -> None:
    """Refuse configs of prime-rl's programs that do no reinforcement learning. Raises ConfigError."""
    data = tree.get("data")
    if any(isinstance(tree.get(name), dict) for name in ("orchestrator", "trainer")):
        return
    if isinstance(data, dict) and "fake" not in data:
        program, advice = "supervised training", "write one for `stagecoach sft` by hand, after the preset sft_demo"
    elif isinstance(tree.get("eval"), dict) and not {*tree} & {"train", "env", "max_steps", "batch_size"}:
        program, advice = "evaluations", "name its environments in a config of your own for `stagecoach eval`"
    else:
        return
    raise ConfigError(
        [f"{path}: a config of prime-rl for {program}. `--from` reads those of reinforcement learning: {advice}"]
    )


def _yaml(text: str) -> Any:
    tree = yaml.safe_load(text)
    return {key: _number(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def _number(value: Any) -> Any:
    """Return a text such as 1e-6 as the number that it is: YAML takes one without a dot for text."""
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def _literal(word: str) -> Any:
    try:
        return _number(yaml.safe_load(word))
    except yaml.YAMLError:  # an operator of the shell, or a text
        return word


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of the one command in a file that starts a script, or TRL's own."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    # Words before the script are of the program that starts it.
    starts = [at for at, word in enumerate(words) if word.endswith(".py") or words[at - 1 : at + 1] == ["trl", "grpo"]]
    if len(starts) != 1:
        raise ValueError(f"want one command that runs a script, or `trl grpo`; this has {len(starts)}")
    values: dict[str, list[str]] = {}
    for word in words[starts[0] + 1 :]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values[name := name.replace("-", "_")] = [value] if equals else []
        elif values:
            values[name].append(word.rstrip(","))
    keys = {name: list(map(_literal, words)) or True for name, words in values.items()}
    keys = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in keys.items()}
    if any(key.startswith("lora_") for key in keys):
        keys.setdefault("use_peft", False)  # without it TRL's own scripts take no notice of them
    return keys

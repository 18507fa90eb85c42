"""Applies the table of another trainer to one of its configs: our settings, and the outcome of every key.

A table has a `KeyRow` for each setting of ours that comes from keys there, and a `Missing` for keys that have no
counterpart here. A key that is in neither is unknown, and is reported as such.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from configs.errors import ConfigError
from configs.fields import plain_annotation, section_types
from configs.load import load
from configs.run import RunConfig
from configs.toml_text import NoTomlForm, toml

OFF: tuple[Any, ...] = (None, False, 0, "", "no", "none", [], {}, ())
"""Values that ask for nothing, so that nothing is lost where their key has no counterpart."""
SAMPLE: list[dict[str, Any]] = [
    {
        "name": "my_data",
        "taskset": {"id": "own_data", "path": "examples.jsonl", "task": {"scoring": "my_reward:reward"}},
        "max_turns": 1,
    }
]
"""The environment of a config that names none that can be: rows of a file, and a reward function beside it."""
MOST_KEYS = 5
"""Keys of one setting that are listed with their values."""


class NoCounterpart(ValueError):
    """A value of another trainer has no counterpart here; the message says why."""


class NotNeeded(Exception):
    """The value of a setting that comes out is the default here, so that nothing is written."""


class Given(Mapping[str, Any]):
    """The keys of a config by dotted name, with the other trainer's defaults behind them.

    Items of lists are numbered: `source.0.name`. A converter may note keys that it leaves out by `drop`.
    """

    def __init__(self, keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.keys_given = dict(keys)
        self.dropped: dict[str, str] = {}
        self._defaults = defaults

    def __getitem__(self, key: str) -> Any:
        return self.keys_given[key] if key in self.keys_given else self._defaults[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_given)

    def __len__(self) -> int:
        return len(self.keys_given)

    def first(self, *keys: str, default: Any = None) -> Any:
        """Return the value of the first of `keys` that is given, else its default there, else `default`."""
        given = [self.keys_given[key] for key in keys if key in self.keys_given]
        return next((value for value in given if value is not None), next(self._of_defaults(keys), default))

    def _of_defaults(self, keys: Sequence[str]) -> Iterator[Any]:
        return (self._defaults[key] for key in keys if self._defaults.get(key) is not None)

    def drop(self, key: str, why: str) -> None:
        """Report `key`, and what is below it, as without a counterpart."""
        self.dropped[key] = why


@dataclass(frozen=True)
class KeyRow:
    """A setting of ours, and the keys of another trainer that it comes from."""

    new: str
    """Dotted key here."""
    old: tuple[str, ...]
    """Keys there; `*` stands for the place in a list, and what is below a key belongs to it."""
    value: Callable[[Given], Any] | None = None
    """Returns our value; without it, that of the first key that is given. Raises NoCounterpart or NotNeeded."""
    note: str = ""
    """How the meaning differs."""
    always: bool = False
    """Whether it is written where no key is given, because the other trainer's default is another than ours."""


@dataclass(frozen=True)
class Missing:
    """Keys of another trainer that have no counterpart here."""

    why: str
    old: tuple[str, ...]
    off: tuple[Any, ...] = ()
    """Values that ask for nothing, beside OFF."""


def names(text: str) -> tuple[str, ...]:
    """Return the names in `text`, which are apart by spaces."""
    return tuple(text.split())


@dataclass(frozen=True)
class ForeignTrainer:
    """What is known of another trainer's configs."""

    name: str
    rows: tuple[KeyRow, ...]
    missing: tuple[Missing, ...]
    defaults: Mapping[str, Any]
    """Its defaults, where they are needed to compute a setting of ours."""

    @property
    def known(self) -> tuple[str, ...]:
        """Every key that the table has, as a pattern."""
        return tuple(old for row in self.rows for old in row.old) + tuple(
            old for entry in self.missing for old in entry.old
        )


class OwnSetting(NamedTuple):
    """A setting of ours that came out, and what it came from."""

    key: str
    value: Any
    origin: str
    """The keys there, with their values; or the trainer's default."""
    note: str
    """How the meaning differs."""


class Lost(NamedTuple):
    """Keys of another trainer that came to nothing here, with their values, and why."""

    keys: str
    why: str


@dataclass
class Translation:
    """Our settings out of a config of another trainer, and the outcome of its keys."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Values by dotted key."""
    carried: list[OwnSetting] = field(default_factory=list)
    """Settings that have the same name and value there."""
    renamed: list[OwnSetting] = field(default_factory=list)
    """Settings that have another name or value there."""
    missing: list[Lost] = field(default_factory=list)
    """Keys without a counterpart."""
    idle: list[str] = field(default_factory=list)
    """Keys without a counterpart that are off there: nothing is lost."""
    unknown: list[str] = field(default_factory=list)
    """Keys that the table does not have: misspelt, or of another version of the trainer."""


def translate(keys: Mapping[str, Any], trainer: ForeignTrainer) -> Translation:
    """Return our settings out of `keys`, values by dotted name; what is no valid setting here is left out and listed.

    The settings that are returned load: `config_of` makes a config of them.
    """
    given = Given(keys, trainer.defaults)
    found = Translation()
    sources: dict[str, tuple[KeyRow, str]] = {}
    for row in trainer.rows:
        used = [key for key in given if any(matches(key, old) for old in row.old)]
        if not used and not row.always:
            continue
        origin = _origin_of(given, used) or f"{row.old[0]} (the default of {trainer.name})"
        try:
            value = row.value(given) if row.value else given.first(*(used or row.old))
            if used or value != own_default(row.new):
                found.settings[row.new] = value
                sources[row.new] = (row, origin)
        except NotNeeded:
            continue
        except NoCounterpart as problem:
            found.missing.append(Lost(origin, str(problem)))
        except (
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
        ) as error:  # a value of a type that the key cannot have
            found.missing.append(Lost(origin, f"not understood: {error}"))
    if "environments" not in found.settings:  # a config without any is none
        found.settings["environments"] = SAMPLE
        sources["environments"] = (KeyRow("environments", ()), "what was given could not be read")
    for key, why in _reject(found.settings).items():
        found.missing.append(Lost(sources[key][1], why))
    for key, value in found.settings.items():
        row, origin = sources[key]
        name = key.rpartition(".")[2]
        same = origin == f"{name} = {one_line(value)}" or origin.endswith(f".{name} = {one_line(value)}")
        (found.carried if same and not row.note else found.renamed).append(OwnSetting(key, value, origin, row.note))
    _report_rest(found, given, trainer)
    return found


def config_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key as the nested tables of a config."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def matches(key: str, pattern: str) -> bool:
    """Tell whether a dotted key is what a pattern names, or is below it; `*` is any one part."""
    parts, wanted = key.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(b in ("*", a) for a, b in zip(parts, wanted, strict=False))


def _reject(settings: dict[str, Any]) -> dict[str, str]:
    """Take those settings out that do not load, and return the reason of each."""
    rejected: dict[str, str] = {}
    while problems := _problems(settings):
        blamed = {
            key: problem.replace(" (recorded config)", "")
            for problem in problems
            for key in settings
            if matches(problem.partition(":")[0], key) or matches(key, problem.partition(":")[0])
        }
        blamed = blamed or {_culprit(settings): problems[0]}
        if settings.get("environments") == SAMPLE:
            blamed.pop("environments", None)
        rejected |= blamed
        for key in blamed:
            del settings[key]
        if "environments" in blamed:
            settings["environments"] = SAMPLE
    return rejected


def _culprit(settings: Mapping[str, Any]) -> str:
    """Return the setting without which there are the fewest problems, where they are said of keys that are not set."""
    without = {key: {name: each for name, each in settings.items() if name != key} for key in settings}
    return min(without, key=lambda key: (key == "environments", len(_problems(without[key]))))


def _problems(settings: Mapping[str, Any]) -> Sequence[str]:
    try:
        load(base=config_of(settings))
    except ConfigError as error:
        return error.problems
    return ()


def _origin_of(given: Given, keys: Sequence[str]) -> str:
    # A converter of whole sections, as of environments, has too many keys to list with their values.
    if len(keys) > MOST_KEYS:
        return f"{keys[0]} and {len(keys) - 1} more"
    return ", ".join(f"{key} = {one_line(given[key])}" for key in keys)


def _report_rest(found: Translation, given: Given, trainer: ForeignTrainer) -> None:
    """List what no row used: keys without a counterpart, those of one reason together, and unknown ones."""
    by_reason: dict[str, list[str]] = {}
    for key, why in given.dropped.items():
        by_reason.setdefault(why, []).append(f"{key} = {one_line(given[key])}" if key in given.keys_given else key)
    for key, value in given.items():
        if any(matches(key, old) for row in trainer.rows for old in row.old):
            continue
        entry = next((each for each in trainer.missing if any(matches(key, old) for old in each.old)), None)
        if entry is None:
            found.unknown.append(key)
        elif any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in (*OFF, *entry.off)):
            found.idle.append(f"{key} = {one_line(value)}")
        else:
            by_reason.setdefault(entry.why, []).append(f"{key} = {one_line(value)}")
    found.missing += [Lost(_together(keys), why) for why, keys in by_reason.items()]


def _together(keys: Sequence[str]) -> str:
    """Return keys with their values, or of many what their names begin with."""
    if len(keys) <= MOST_KEYS:
        return ", ".join(keys)
    names = [key.partition(" = ")[0] for key in keys]
    begin = [parts[0] for parts in zip(*(name.split(".") for name in names), strict=False) if len(set(parts)) == 1]
    return f"{'.'.join(begin)} ({len(keys)} keys)" if len(begin) > 1 else ", ".join(names)


def one_line(value: Any) -> str:
    """Return a value as TOML writes it, in at most 80 characters; of environments the names."""
    if isinstance(value, list) and value and all(isinstance(each, Mapping) and "name" in each for each in value):
        value = [each["name"] for each in value]
    try:
        text = "null" if value is None else toml(value)
    except NoTomlForm:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by dotted key; items of lists of tables are numbered; empty tables count."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            yield from flat({str(index): each for index, each in enumerate(value)}, f"{key}.")
        else:
            yield key, value


def own_default(key: str) -> Any:
    """Return the default of a setting here; None where a section has it that is not there by default."""
    node: Any = RunConfig().model_dump(mode="json")
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def is_setting(key: str) -> bool:
    """Tell whether a dotted key is one of our config's: of any type that a section may have."""
    types: list[Any] = [RunConfig]
    for name in key.split("."):
        fields = [each.model_fields[name].annotation for each in types if name in each.model_fields]
        if not fields:
            return False
        types = [model for annotation in fields for model in section_types(plain_annotation(annotation))]
    return True

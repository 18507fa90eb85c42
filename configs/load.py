"""Loads the config of a run out of TOML files and overrides, records it as JSON, and explains what is wrong with it."""

import inspect
import json
import re
import reprlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.checks.run import problems
from configs.errors import ConfigError, did_you_mean
from configs.fields import meanings, plain_annotation, section_types
from configs.layers import (
    Draft,
    Location,
    dotted_key,
    json_problems,
    read,
    removed_key,
    translate,
    translate_recorded,
)
from configs.run import RunConfig
from configs.secrets import secrets_in

Origin = Callable[[Location], str]
"""Says which file or override a value came from."""


def load(
    files: Sequence[Path | str] = (), overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> RunConfig:
    """Return the config of `files`, which may be names of presets, and of `overrides` such as `steps=5`.

    `base` is a recorded config to start from instead of the defaults. Raises ConfigError with everything that is
    wrong: unknown keys and wrong types first, then what does not fit together.
    """
    config, _ = _merge(files, overrides, base)
    secrets, doubtful = secrets_in(config.model_dump(mode="json"), base)
    if found := [*problems(config), *secrets]:
        raise ConfigError(found)
    for line in doubtful:
        warnings.warn(line, stacklevel=2)
    return config


def override(recorded: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return a recorded config with other settings, of what changes no rows: its sections are not checked anew.

    Raises ConfigError for unknown keys and wrong types.
    """
    return _merge((), overrides, recorded.model_dump(mode="json"))[0]


def _merge(
    files: Sequence[Path | str], overrides: Sequence[str], base: Mapping[str, Any] | None
) -> tuple[RunConfig, Draft]:
    # With the defaults in it, a merge knows the `type` that stands there, and an override reaches items of lists.
    draft = Draft(RunConfig().model_dump(mode="json"))
    if base is not None:
        base = dict(base)
        translate_recorded(base)
        draft.merge(base, "recorded config")
    for file in files:
        draft.merge(*read(file))
    misplaced = _apply_overrides(draft, overrides)  # reported with what validation finds, all at once
    translate(draft.tree)
    return _validate(draft.tree, draft.source, misplaced), draft


@dataclass(frozen=True)
class Setting:
    """One setting of a config: its dotted key, its value, its default, where the value came from, what it means.

    `source` is empty for a default.
    """

    key: str
    value: Any
    default: Any
    source: str
    meaning: str


def settings(files: Sequence[Path | str] = (), overrides: Sequence[str] = ()) -> list[Setting]:
    """Return every setting of the config of `files` and `overrides`, in the order of its sections; see `load`.

    What does not fit together is no mistake here.
    """
    config, draft = _merge(files, overrides, None)
    return list(_settings(config, (), draft))


def _settings(section: BaseModel, location: Location, draft: Draft) -> Iterator[Setting]:
    documented = meanings(type(section))
    for name, field in type(section).model_fields.items():
        value, here = getattr(section, name), (*location, name)
        inside = (
            {(*here, place): each for place, each in enumerate(value)} if isinstance(value, tuple) else {here: value}
        )
        if inside and all(isinstance(each, BaseModel) for each in inside.values()):
            for place, each in inside.items():
                yield from _settings(each, place, draft)
        else:
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            # What a `type` means is what its section says of itself.
            meaning = documented.get(name) or inspect.getdoc(type(section)) or ""
            yield Setting(dotted_key(here), value, default, draft.source(here), meaning)


def nearest_key(text: str) -> str | None:
    """Return the key of a config that a wrong one was probably meant to be; None where none is near."""
    parent, _, name = text.rpartition(".")
    return _nearest(name, parent, None)


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
        translate_recorded(tree)
    return _validate(tree, lambda location: "recorded config")


def _apply_overrides(draft: Draft, overrides: Sequence[str]) -> list[str]:
    problems: list[str] = []
    for override in overrides:
        try:
            draft.override(override)
        except ConfigError as error:
            problems += error.problems
    return problems


def _validate(tree: Any, origin: Origin, problems: Sequence[str] = ()) -> RunConfig:
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError([*problems, *(_line(details, origin) for details in error.errors())]) from error
    if problems or json_problems(tree):
        raise ConfigError([*problems, *json_problems(tree)])
    return config


def _line(details: ErrorDetails, origin: Origin) -> str:
    location, owner = _locate(details["loc"])
    came_from = origin(location)
    where = f" ({came_from})" if came_from else ""
    if details["type"] == "extra_forbidden":
        return _unknown(location, owner, where)
    if details["type"] == "union_tag_not_found":
        return f"{dotted_key(location)}: say of which `type` it is{where}"
    near = _nearest_choice(details)
    if details["type"] == "union_tag_invalid":
        choice = details["ctx"]
        return f"{dotted_key(location)}.type: {choice['tag']!r} is none of {choice['expected_tags']}{where}{near}"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    given = "" if details["type"] in ("missing", "value_error") else f"; it is {reprlib.repr(details['input'])}"
    if isinstance(details["input"], date | time):
        given = f"; {details['input']} is read as a date or time: put it in quotes"
    return f"{dotted_key(location)}: {message}{given}{where}{near}"


def _nearest_choice(details: ErrorDetails) -> str:
    """Return which of the allowed values a refused text is nearest to, as the end of a message."""
    context = details.get("ctx", {})
    if details["type"] not in ("literal_error", "union_tag_invalid"):
        return ""
    given = context.get("tag") or details["input"]
    allowed = re.findall(r"'([^']*)'", str(context.get("expected") or context.get("expected_tags")))
    return did_you_mean(str(given), allowed)


def _unknown(location: Location, owner: type[BaseModel] | None, where: str) -> str:
    advice = removed_key(dotted_key(location))
    if advice:
        return f"{dotted_key(location)}: no longer a key{where}; {advice}"
    parent = dotted_key(location[:-1])
    near = _nearest(str(location[-1]), parent, owner)
    if near == dotted_key(location):
        return f"{near}: not a key of this {parent}.type{where}; it belongs to another one, which is to be set first"
    return f"{dotted_key(location)}: unknown key{where}" + (f"; did you mean {near}?" if near else "")


def _nearest(name: str, parent: str, owner: type[BaseModel] | None) -> str | None:
    # Reversed, so that of several keys with one last name the shortest, and of these the first of the config, stays.
    keys = sorted(known_keys(RunConfig), key=lambda known: known.count("."))
    elsewhere = {known.rpartition(".")[2]: known for known in reversed(keys)}
    if name in elsewhere:
        return elsewhere[name]
    # As `lr` for learning_rate.
    initials = {"".join(word[:1] for word in known.split("_")): known for known in elsewhere if "_" in known}
    if name in initials:
        return elsewhere[initials[name]]
    for near in get_close_matches(name, owner.model_fields if owner else (), 1, 0.6):
        return f"{parent}.{near}" if parent else near
    # Among the keys of all sections there are many more, so one has to be nearer to be what was meant.
    return next((elsewhere[near] for near in get_close_matches(name, elsewhere, 1, 0.8)), None)


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of `model`; keys inside lists carry `*`."""
    for name, field in model.model_fields.items():
        yield prefix + name
        annotation = plain_annotation(field.annotation)
        inside = "*." if get_origin(annotation) is tuple else ""
        for member in section_types(annotation):
            yield from known_keys(member, f"{prefix}{name}.{inside}")


def _locate(loc: tuple[str | int, ...]) -> tuple[Location, type[BaseModel] | None]:
    """Return pydantic's location without the tags of unions, and the model that the last key belongs to."""
    at: Any = RunConfig
    location: Location = ()
    owner: type[BaseModel] | None = None
    for part in loc:
        at = plain_annotation(at)
        # The tag of a union stands in the location as if it were a key.
        tagged = [
            member
            for member in section_types(at)
            if member.__name__ == part
            or ("type" in member.model_fields and member.model_fields["type"].default == part)
        ]
        if get_origin(at) in (Union, UnionType) and tagged:
            at = tagged[0]
            continue
        location = (*location, part)
        owner = at if isinstance(at, type) and issubclass(at, BaseModel) else None
        at = _inside(at, part)
    return location, owner


def _inside(at: Any, part: str | int) -> Any:
    if isinstance(at, type) and issubclass(at, BaseModel):
        return at.model_fields[str(part)].annotation if part in at.model_fields else None
    return get_args(at)[0] if get_origin(at) is tuple else None

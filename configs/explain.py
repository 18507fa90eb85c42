"""What is wrong with a config, in one line each: the dotted key, the file it came from, the nearest known name."""

import reprlib
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.former_keys import removed
from configs.layers import Location, dotted

Source = Callable[[Location], str]


def explain(error: ValidationError, model: type[BaseModel], source: Source) -> list[str]:
    """Return one line for each error of validating `model`."""
    return [_line(details, model, source) for details in error.errors()]


def _line(details: ErrorDetails, model: type[BaseModel], source: Source) -> str:
    location, owner = _locate(model, details["loc"])
    origin = source(location)
    where = f" ({origin})" if origin else ""
    if details["type"] == "extra_forbidden":
        return _unknown(location, owner, model, where)
    if details["type"] == "union_tag_not_found":
        return f"{dotted(location)}: say of which `type` it is{where}"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    given = "" if details["type"] in ("missing", "value_error") else f"; it is {reprlib.repr(details['input'])}"
    return f"{dotted(location)}: {message}{given}{where}"


def _unknown(location: Location, owner: type[BaseModel] | None, model: type[BaseModel], where: str) -> str:
    gone = removed(dotted(location))
    if gone:
        return f"{dotted(location)}: no longer a key{where}; {gone}"
    near = _nearest(str(location[-1]), dotted(location[:-1]), owner, model)
    return f"{dotted(location)}: unknown key{where}" + (f"; did you mean {near}?" if near else "")


def _nearest(name: str, parent: str, owner: type[BaseModel] | None, model: type[BaseModel]) -> str | None:
    elsewhere = {known.rpartition(".")[2]: known for known in reversed(list(known_keys(model)))}
    if name in elsewhere:
        return elsewhere[name]
    for near in get_close_matches(name, owner.model_fields if owner else (), 1, 0.6):
        return f"{parent}.{near}" if parent else near
    return next((elsewhere[near] for near in get_close_matches(name, elsewhere, 1, 0.8)), None)


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of `model`; keys inside lists carry `*`."""
    for name, field in model.model_fields.items():
        yield prefix + name
        annotation = _plain(field.annotation)
        inside = "*." if get_origin(annotation) is tuple else ""
        for member in members(annotation):
            yield from known_keys(member, f"{prefix}{name}.{inside}")


def members(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a field of this annotation may hold, itself or as items of a list."""
    annotation = _plain(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (tuple, Union, UnionType):
        return [model for argument in get_args(annotation) for model in members(argument)]
    return []


def _plain(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _locate(model: type[BaseModel], loc: tuple[str | int, ...]) -> tuple[Location, type[BaseModel] | None]:
    """Return pydantic's location without the tags of unions, and the model that the last key belongs to."""
    at: Any = model
    location: Location = ()
    owner: type[BaseModel] | None = None
    for part in loc:
        at = _plain(at)
        tagged = [m for m in members(at) if "type" in m.model_fields and m.model_fields["type"].default == part]
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

"""Builds an environment's verifiers config, its examples and its facts, in the environment's own process."""

import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from configs.environments import SeatConfig
from storage.schemas.stage_tables import EXAMPLES
from tasks.inference.environments.introspection import EnvironmentFacts, facts_of
from tasks.inference.environments.servers import write_rows
from tasks.inference.trace_rows.rows import canonical_json
from tasks.runtime.imports import load_function

if TYPE_CHECKING:
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.task import Task, TaskData


COUNT_SECONDS = 5.0
"""Longest time in which examples beyond `max_examples` are counted."""
PLAYER_KEYS = ("model", "client", "sampling")
"""Settings of a seat that name its model: not allowed in `env`, or rows would name the wrong model."""


class UnknownSeat(ValueError):
    """A config has settings of a seat that its environment does not have."""


def verifiers_config(environment: Mapping[str, Any]) -> "EnvConfig":
    """Return the verifiers config of an environment's section, with its harness, runtime and turn limit on every seat.

    Settings of one seat override those of all. Raises UnknownSeat where a seat is named that the environment lacks, and
    what verifiers raises for an environment or a setting that it does not know.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type, resolve_env_config

    env_settings = dict(environment.get("env") or {})
    kind = env_config_type(environment["taskset"]["id"], env_settings.get("id", ""))
    names = [name for name, field in kind.model_fields.items() if isinstance(field.default, AgentConfig)]
    seat_of_key = {f"seats.{name}": name for name in environment.get("seats") or {}}
    if environment.get("evaluation_seat"):
        seat_of_key["evaluation_seat"] = environment["evaluation_seat"]
    for key, name in seat_of_key.items():
        if name not in names:
            raise UnknownSeat(f"{key}: the environment has no seat {name!r}; its seats are {', '.join(names)}")
    seats = {name: _seat_settings(environment, name, env_settings.get(name) or {}) for name in names}
    return resolve_env_config({**env_settings, "taskset": environment["taskset"], **seats})


def _seat_settings(environment: Mapping[str, Any], name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one seat: of all seats, overridden by `env`, overridden by the section seats.NAME."""
    for key in PLAYER_KEYS:
        if key in settings:
            raise ValueError(f"env.{name}.{key}: who plays a seat, and how, is set in the section seats.{name}")
    seat = {"harness": environment["harness"], "runtime": environment["runtime"]}
    if environment.get("max_turns") is not None:
        seat["max_turns"] = environment["max_turns"]
    own = (environment.get("seats") or {}).get(name) or {}
    own_settings = {key: own[key] for key in ("harness", "runtime", "max_turns") if own.get(key)}
    if sampling := SeatConfig.model_validate(own).request_sampling:
        own_settings["sampling"] = sampling
    return {**seat, **settings, **own_settings}


def task_content(task: "Task[Any]") -> dict[str, Any]:
    """Return a task's data as JSON values, without its index (which moves as data grows) and without default values.

    Defaults are left out of the task's own fields only: in nested values they may distinguish kinds of messages.
    """
    kind: Any = type(task.data)
    defaults = {name for name, value in _defaults(kind).items() if getattr(task.data, name) == value}
    content: dict[str, Any] = task.data.model_dump(mode="json", exclude=defaults | {"idx"}, serialize_as_any=True)
    return content


@lru_cache(maxsize=64)
def _defaults(kind: "type[TaskData]") -> Mapping[str, Any]:
    """Return the default of every field; once for a class, as pydantic looks at a factory's signature each time."""
    return {name: field.get_default(call_default_factory=True) for name, field in kind.model_fields.items()}


def example_id(task: "Task[Any]", content: Mapping[str, Any]) -> str:
    """Return a stable id: the source's own, the task's own key, or a digest of the content."""
    from verifiers.v1.task import Task

    if task.data.id or type(task).key is not Task.key:
        own: str = task.data.id or task.key
        return own
    # 96 bits: two of a billion contents share an id with a chance below 1e-10, and `example_rows` would refuse them.
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:24]


def split_of(content: Mapping[str, Any], fraction: float, seed: int) -> str:
    """Return "eval" for a fraction of all contents, by hash: a content's split does not depend on the others."""
    digest = hashlib.sha256(f"{seed}:{canonical_json(content)}".encode()).digest()
    return "eval" if int.from_bytes(digest[:8], "big") < fraction * 2**64 else "train"


def example_rows(environment: Mapping[str, Any], tasks: Iterator["Task[Any]"]) -> Iterator[dict[str, str]]:
    """Yield one examples row for each task; a repeated one is left out, two contents under one id raise ValueError."""
    contents: dict[str, str] = {}
    for task in itertools.islice(tasks, environment["max_examples"]):
        content = task_content(task)
        name, text = example_id(task, content), canonical_json(content)
        if name in contents:  # data sets repeat rows; a second group of the same example would count it twice
            if contents[name] != text:
                raise ValueError(f"two different examples have the id {name!r}: ids and keys of tasks must be unique")
            continue
        contents[name] = text
        yield {
            "environment": environment["name"],
            "example_id": name,
            "split": split_of(content, environment["holdout_fraction"], environment["holdout_seed"]),
            "task": canonical_json({"idx": task.data.idx, **content}),
        }


def write_examples(environment: Mapping[str, Any], target: Path) -> EnvironmentFacts:
    """Load the environment, write its examples to `target` as an Arrow file, and return what its code says of itself.

    Raises what `verifiers_config`, `facts_of` and `load_function` raise, and what the environment itself does.
    """
    from verifiers.v1.utils.loaders import load_environment

    # As its server does it: what fails there fails here, before anything is started.
    env = load_environment(verifiers_config(environment))
    tasks = iter(env.taskset)
    first = next(tasks, None)
    facts = facts_of(env, first)
    for reward in environment["group_rewards"].values():
        load_function(reward["function"])
    numbers = itertools.count()
    counted = (task for task, _ in zip(itertools.chain([] if first is None else [first], tasks), numbers, strict=False))
    rows = list(example_rows(environment, counted))
    num_repeated = next(numbers) - len(rows)
    write_rows(target, pa.Table.from_pylist(rows, schema=EXAMPLES.arrow))
    beyond = _count_in_words(tasks) if env.taskset.bounded else ""
    return replace(facts, num_repeated=num_repeated, num_beyond=beyond)


def _count_in_words(tasks: Iterator[object]) -> str:
    """Return how many tasks are left, counted for COUNT_SECONDS; empty for none."""
    count, until = 0, time.monotonic() + COUNT_SECONDS
    try:
        for _ in tasks:
            count += 1
            if time.monotonic() > until:
                return f"at least {count:,}"
    except Exception:  # one that nobody asked for cannot be read
        return f"at least {count + 1:,}"
    return f"{count:,}" if count else ""

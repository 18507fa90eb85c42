"""An environment's verifiers config and its examples, made in the environment's own process."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from storage.schemas.stage_tables import EXAMPLES

if TYPE_CHECKING:
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.task import Task


PLAYER_KEYS = ("model", "client", "sampling")
"""What of a seat says who plays it: that is not the environment's to choose, or rows would name the wrong model."""


class UnknownSeat(ValueError):
    """A config has settings of a seat that its environment does not have."""


def verifiers_config(environment: Mapping[str, Any]) -> "EnvConfig":
    """The verifiers config of an environment: our harness, runtime and turn limit on every seat that it declares.

    Settings of one seat go before those of all. Raises UnknownSeat where a seat is named that is not there, and what
    verifiers raises of an environment or a setting that it does not know.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type, resolve_env_config

    own = dict(environment.get("env") or {})
    kind = env_config_type(environment["taskset"]["id"], own.get("id", ""))
    names = [name for name, field in kind.model_fields.items() if isinstance(field.default, AgentConfig)]
    named = {f"seats.{name}": name for name in environment.get("seats") or {}}
    if environment.get("evaluation_seat"):
        named["evaluation_seat"] = environment["evaluation_seat"]
    for key, name in named.items():
        if name not in names:
            raise UnknownSeat(f"{key}: the environment has no seat {name!r}; its seats are {', '.join(names)}")
    seats = {name: _seat_settings(environment, name, own.get(name) or {}) for name in names}
    return resolve_env_config({**own, "taskset": environment["taskset"], **seats})


def _seat_settings(environment: Mapping[str, Any], name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one seat: those of all seats, those that `env` has for it, and those of its own section."""
    for key in PLAYER_KEYS:
        if key in settings:
            raise ValueError(
                f"env.{name}.{key}: who plays a seat is set in the section seats.{name}, as model and temperature"
            )
    seat = {"harness": environment["harness"], "runtime": environment["runtime"]}
    if environment.get("max_turns") is not None:
        seat["max_turns"] = environment["max_turns"]
    own = (environment.get("seats") or {}).get(name) or {}
    set_here = {key: own[key] for key in ("harness", "runtime", "max_turns") if own.get(key)}
    if own.get("temperature") is not None:
        set_here["sampling"] = {"temperature": own["temperature"]}
    return {**seat, **settings, **set_here}


def task_content(task: "Task[Any]") -> dict[str, Any]:
    """A task's data as JSON values without its place in the list, which moves as data grows, and without defaults.

    Defaults are left out of the task's own fields only: deeper down they tell one kind of message from another.
    """
    defaults = {
        name
        for name, field in type(task.data).model_fields.items()
        if getattr(task.data, name) == field.get_default(call_default_factory=True)
    }
    content: dict[str, Any] = task.data.model_dump(mode="json", exclude=defaults | {"idx"}, serialize_as_any=True)
    return content


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def example_id(task: "Task[Any]", content: Mapping[str, Any]) -> str:
    """A durable id: the source's own, the task's own key, or a digest of the content."""
    from verifiers.v1.task import Task

    if task.data.id:
        return task.data.id
    if type(task).key is not Task.key:
        return task.key
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:24]


def split_of(content: Mapping[str, Any], fraction: float, seed: int) -> str:
    """`eval` for a share of the contents, chosen by hash; the choice for one content never depends on the others."""
    digest = hashlib.sha256(f"{seed}:{canonical_json(content)}".encode()).digest()
    return "eval" if int.from_bytes(digest[:8], "big") < fraction * 2**64 else "train"


def example_rows(environment: Mapping[str, Any], tasks: Iterator["Task[Any]"]) -> Iterator[dict[str, str]]:
    """Yield one examples row for each task; a repeated one is left out, two contents under one id are an error."""
    seen: dict[str, str] = {}
    for task in itertools.islice(tasks, environment["max_examples"]):
        content = task_content(task)
        name, text = example_id(task, content), canonical_json(content)
        if name in seen:
            if seen[name] != text:
                raise ValueError(f"two different examples have the id {name!r}: ids and keys of tasks must be unique")
            continue
        seen[name] = text
        yield {
            "environment": environment["name"],
            "example_id": name,
            "split": split_of(content, environment["holdout_fraction"], environment["holdout_seed"]),
            "task": canonical_json({"idx": task.data.idx, **content}),
        }


def write_examples(environment: Mapping[str, Any], target: Path) -> None:
    """Load the taskset and write its examples to `target` as an Arrow file."""
    from verifiers.v1.utils.loaders import load_taskset

    taskset = load_taskset(verifiers_config(environment).taskset)
    table = pa.Table.from_pylist(list(example_rows(environment, iter(taskset))), schema=EXAMPLES.arrow)
    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)

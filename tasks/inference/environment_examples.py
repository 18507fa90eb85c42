"""The examples of an environment: one row for each task of its taskset, with a durable id and a side of the split."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from storage.schemas import EXAMPLES
from tasks.inference.environment_config import resolved

if TYPE_CHECKING:
    from verifiers.v1.task import Task


def content_of(task: "Task[Any]") -> dict[str, Any]:
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


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def example_id(task: "Task[Any]", content: Mapping[str, Any]) -> str:
    """A durable id: the source's own, the task's own key, or a digest of the content."""
    from verifiers.v1.task import Task

    if task.data.id:
        return task.data.id
    if type(task).key is not Task.key:
        return task.key
    return hashlib.sha256(canonical(content).encode()).hexdigest()[:24]


def split_of(content: Mapping[str, Any], fraction: float, seed: int) -> str:
    """`eval` for a share of the contents, chosen by hash; the choice for one content never depends on the others."""
    digest = hashlib.sha256(f"{seed}:{canonical(content)}".encode()).digest()
    return "eval" if int.from_bytes(digest[:8], "big") < fraction * 2**64 else "train"


def rows(environment: Mapping[str, Any], tasks: Iterator["Task[Any]"]) -> Iterator[dict[str, str]]:
    """Yield one examples row for each task; a repeated one is left out, two contents under one id are an error."""
    seen: dict[str, str] = {}
    for task in itertools.islice(tasks, environment["max_examples"]):
        content = content_of(task)
        name, text = example_id(task, content), canonical(content)
        if name in seen:
            if seen[name] != text:
                raise ValueError(f"two different examples have the id {name!r}: ids and keys of tasks must be unique")
            continue
        seen[name] = text
        yield {
            "environment": environment["name"],
            "example_id": name,
            "split": split_of(content, environment["holdout_fraction"], environment["holdout_seed"]),
            "task": canonical({"idx": task.data.idx, **content}),
        }


def write_examples(environment: Mapping[str, Any], target: Path) -> None:
    """Load the taskset and write its examples to `target` as an Arrow file."""
    from verifiers.v1.utils.loaders import load_taskset

    taskset = load_taskset(resolved(environment).taskset)
    table = pa.Table.from_pylist(list(rows(environment, iter(taskset))), schema=EXAMPLES.arrow)
    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)

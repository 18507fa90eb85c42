"""Which code scores an environment's traces, and the digest of it; nothing of it is imported."""

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.inference.environments import EnvironmentUnavailable

if TYPE_CHECKING:
    from configs.sections import EnvironmentConfig


def source_digest(environment: "EnvironmentConfig") -> str:
    """SHA-256 over the files of every package that an environment's section names, and the version of verifiers.

    Those are the taskset's, the harness's, and the functions plugged into the task by import path. What
    verifiers brings along, or is not installed, adds nothing. Raises EnvironmentUnavailable for a file that is missing.
    """
    digest = hashlib.sha256(f"verifiers {version('verifiers')}".encode())
    for name in dict.fromkeys(_modules(environment)):
        for file, inside in _files(name):
            digest.update(f"\0{name}\0{inside}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _modules(environment: "EnvironmentConfig") -> Iterator[str]:
    """Yield the top-level modules, or the paths of files, whose code may take part in scoring."""
    for plugin in (environment.taskset, environment.harness):
        # An id may say whose and which version: owner/name@version; the module is called by the name alone.
        yield str(plugin["id"]).rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    task = environment.taskset.get("task") or {}
    for kind in ("rewards", "metrics"):
        for plugged in (task.get(kind) or {}).values():
            if path := plugged.get("fn"):
                file = path.rpartition(":")[0]
                top = path.replace(":", ".").partition(".")[0]
                yield _required(environment, file) if file.endswith(".py") else top


def _required(environment: "EnvironmentConfig", path: str) -> str:
    if not Path(path).is_file():
        raise EnvironmentUnavailable(
            f"environment {environment.name!r}: a function is plugged in from {path!r}, which is no file here"
        )
    return path


def _files(module: str) -> Iterator[tuple[Path, str]]:
    """Yield the files of a module with their names inside it, in order."""
    if module.endswith(".py"):
        yield Path(module), Path(module).name
        return
    spec = find_spec(module)
    if spec is None:
        return
    if not spec.submodule_search_locations:
        yield Path(spec.origin or ""), Path(spec.origin or "").name
        return
    for root in sorted(spec.submodule_search_locations):
        for file in sorted(Path(root).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file, file.relative_to(root).as_posix()

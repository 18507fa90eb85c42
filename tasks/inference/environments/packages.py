"""Packages of environments: names, versions and a digest of all code and data that make their rows; none is imported.

A version alone does not name code: that of a checkout stays while its code is edited, and two packages may share one.
"""

import ast
import hashlib
import importlib
import os
import re
import symtable
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from glob import glob
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, distribution, distributions, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from configs.errors import did_you_mean, differing_parts
from tasks.inference.engine.model_info import file_digest
from tasks.runtime.imports import DISTRIBUTION

if TYPE_CHECKING:
    from configs.environments import EnvironmentConfig

Section = Mapping[str, Any]
"""An environment's section as plain values: a process that serves it has no need of the config's models."""
SHOWN = 16
"""Hexadecimal digits of a digest: 64 bits, since nobody gains from two packages that share them."""
# An import path of a function, in a module or in a file of its own.
_FUNCTION = re.compile(r"([^:\n]+\.py|[A-Za-z_][\w.]*):([A-Za-z_]\w*)")
# Code that may bind names which stand nowhere in it.
_BINDS_UNSEEN = re.compile(
    r"\b(globals|locals|vars|setattr|exec|eval|__dict__|__getattr__|sys\.modules)\b|\bimport\s*\*"
)
_NEEDS_VERIFIERS = re.compile(r"verifiers\b(?!.*\bextra\b)")
_NOT_OWN = sys.stdlib_module_names | {"verifiers", "stagecoach"}
_COMPILED = (".pyc", ".pyo")
_distributions = lru_cache(packages_distributions)
"""Returns the distributions of all modules, as they were when the last version was asked for."""


class EnvironmentUnavailable(ValueError):
    """An environment's package is not installed, cannot be loaded as configured, or is not the one of its run."""


def package_version(environment: "EnvironmentConfig | Section") -> str:
    """Return names, versions and digests of the packages whose code runs in the environment, and of its other inputs.

    The digest is over the files of the package as it is imported, by their names in it: a wheel and a checkout of the
    same files have the same. Packages that it imports count where their code is somebody's own: outside of what is
    installed, or built on verifiers. So do functions that a setting names by import path and files that one names.
    Imports inside strings (`importlib`) are not seen, nor is data that code fetches or finds by itself.

    Raises EnvironmentUnavailable where a package is not installed, or a file of it cannot be read.
    """
    # A module may have been written a moment ago, as in a notebook.
    importlib.invalidate_caches()
    _distributions.cache_clear()
    section = environment if isinstance(environment, Mapping) else environment.model_dump()
    try:
        parts = [*_code(section), *_data(section), f"verifiers {version('verifiers')}"]
    except OSError as error:
        raise EnvironmentUnavailable(f"environment {section['name']!r}: its code cannot be read: {error}") from error
    return ", ".join(dict.fromkeys(parts))


def require_same_code(environment: "EnvironmentConfig | Section") -> None:
    """Raise EnvironmentUnavailable where the environment is not installed, or is other code than its run began with.

    Called whenever a process is about to load it: what that makes is recorded under the version that the run has.
    """
    section = environment if isinstance(environment, Mapping) else environment.model_dump()
    here = package_version(section)
    if section["version"] and here != section["version"]:
        recorded, present = differing_parts(section["version"], here)
        raise EnvironmentUnavailable(
            f"environment {section['name']!r} was edited: the run began with {recorded}, here it is {present}. No "
            "process was started with it; what was sampled is safe. Bring that code back, or start a new run with this "
            "one"
        )


class Plugin(NamedTuple):
    """A part of an environment that a package brings, by the id in its section: a name, or owner/name@version."""

    kind: str
    """The key of its section."""
    section: Section
    group: str
    """The folder of verifiers with plug-ins of this kind."""

    @property
    def distribution(self) -> str:
        """The name of the package."""
        return str(self.section.get("id", "")).rsplit("/", 1)[-1].partition("@")[0]

    @property
    def module(self) -> str:
        """The module that the package brings."""
        return _as_module(self.distribution)

    def part(self, environment: str) -> str:
        """Return its part of the environment's version. Raises EnvironmentUnavailable where it is not installed."""
        if not self.section.get("id"):
            text = f"environment {environment!r}: {self.kind}.id is missing; it names a package"
            raise EnvironmentUnavailable(text)
        if self.module in _stock(self.group):  # verifiers looks there first
            return f"verifiers {version('verifiers')}"
        if _spec(self.module) is None:
            raise EnvironmentUnavailable(
                f"environment {environment!r}: {self.kind} {self.distribution!r} is not installed: there is no module "
                f"{self.module!r}. {self._advice()}"
            )
        return f"{_label(self.module)} sha256:{module_digest(self.module)[:SHOWN]}"

    def _advice(self) -> str:
        modules = packages_distributions()
        if brought := sorted(name for name, owners in modules.items() if self.module in map(_as_module, owners)):
            return f"The package {self.distribution!r} is installed; its modules are {', '.join(brought)}"
        names = [*modules, *(each.metadata["Name"].replace("-", "_") for each in distributions())]
        if near := get_close_matches(self.module, [*_stock(self.group), *names], 1, 0.8):
            return f"Did you mean {near[0]!r}, which is installed?"
        # The id names no package of a registry: there a stranger may have the name.
        return (
            "Install an environment of Prime's hub with `prime env install OWNER/NAME`, or one of the folder "
            "environments/ of verifiers' repository out of a checkout of it"
        )


def _as_module(distribution: str) -> str:
    return distribution.replace("-", "_").lower()


@lru_cache
def _stock(group: str) -> set[str]:
    """Return the modules of a group that come with verifiers, packages and files of code."""
    spec = find_spec("verifiers")
    roots = spec.submodule_search_locations if spec else None
    places = [path for root in roots or () for path in Path(root, "v1", group).glob("[a-z]*")]
    return {path.stem for path in places if path.is_dir() or path.suffix == ".py"}


def _code(environment: Section) -> Iterator[str]:
    """Yield a part for each package: those of plug-ins, of functions by import path, and what these import."""
    modules, files = _functions(environment)
    seen: dict[str, None] = {}
    for plugin in _plugins(environment):
        yield plugin.part(environment["name"])
        if plugin.module not in _stock(plugin.group):
            seen[plugin.module] = None
    yield from map(_file_part, files)
    queue = [*seen, *modules, *(name for file in files for name in _imports_of([file]))]
    for module in queue:  # which grows meanwhile
        if module not in seen:
            seen[module] = None
            yield f"{_label(module)} sha256:{module_digest(module)[:SHOWN]}"
        queue += [name for name in _imports_of(path for _, path in _module_files(module)) if name not in queue]


def _plugins(environment: Section) -> Iterator[Plugin]:
    """Yield the plug-ins that an environment consists of."""
    taskset, env, seats = environment["taskset"], environment["env"], environment["seats"]
    yield Plugin("taskset", taskset, "tasksets")
    yield Plugin("harness", environment["harness"], "harnesses")
    if env.get("id"):
        yield Plugin("env", env, "envs")
    harnesses = {f"seats.{name}": seat["harness"] for name, seat in seats.items() if seat["harness"]}
    # An environment's own settings may name the harness of a seat, too.
    own = {f"env.{name}": seat.get("harness") for name, seat in env.items() if isinstance(seat, dict)}
    harnesses |= {name: harness for name, harness in own.items() if isinstance(harness, dict) and "id" in harness}
    yield from (Plugin(f"{name}.harness", harness, "harnesses") for name, harness in harnesses.items())
    # A harness may play another one within its limits.
    for name, harness in {"harness": environment["harness"], **harnesses}.items():
        if isinstance(other := harness.get("harness"), Mapping) and other:
            yield Plugin(f"{name}.harness", other, "harnesses")
    task = taskset.get("task")
    judges = task.get("judges") if isinstance(task, Mapping) else None
    yield from (Plugin("judge", judge, "judges") for judge in judges or () if isinstance(judge, Mapping))


def _label(module: str) -> str:
    """Return name and version of the distribution that has a module, or what says that there is none."""
    name = _distribution_of(module)
    if name == DISTRIBUTION:
        # Stagecoach's wheel brings the samples, packages of their own in a checkout: in keys both have one name.
        return f"{module.replace('_', '-')} {version(name)}"
    return f"{name} {version(name)}" if name else f"{module} (not a package)"


def _distribution_of(module: str) -> str:
    try:
        # The usual case, in no time: to go through everything that is installed takes a fifth of a second, once a call.
        return distribution(module.replace("_", "-")).metadata["Name"].replace("_", "-")
    except PackageNotFoundError:
        return next(iter(_distributions().get(module, ())), "")


def _functions(environment: Section) -> tuple[list[str], list[Path]]:
    """Return the top-level modules, and the files, of functions that settings name by import path.

    Raises EnvironmentUnavailable for a file that is missing, and for a function that the code of its module does not
    bind; a missing module is left to the process that loads it.
    """
    modules, files = list[str](), list[Path]()
    for key, text in _texts(environment):
        match = _FUNCTION.fullmatch(text)
        place = match[1] if match else text if key == "fn" else ""
        if match and key == "function" and _spec(place.partition(".")[0]) is None:
            place = f"{place.replace('.', '/')}.py"  # in a directory that is no package
        if match:
            _require_function(environment, match[0], place, match[2])
        if not place.endswith(".py"):
            top = place.partition(".")[0]
            modules += [top] if top and top not in _NOT_OWN and _spec(top) is not None else []
        elif Path(place).is_file():
            files.append(Path(place))
        else:
            raise EnvironmentUnavailable(
                f"environment {environment['name']!r}: a function is plugged in from {place!r}, which is no file here"
            )
    return modules, files


def _require_function(environment: Section, text: str, place: str, name: str) -> None:
    # Beside a package that happens to be installed, a text may be no function: `docker:dind` names an image.
    if not place.endswith(".py") and not _is_own_code(place.partition(".")[0]):
        return
    file = Path(place) if place.endswith(".py") else _source(place)
    names = _bound_names(file.read_text("utf-8", "replace")) if file and file.is_file() else None
    if names is not None and name not in names:
        raise EnvironmentUnavailable(
            f"environment {environment['name']!r}: {text!r} names no function: {place} has no {name!r}"
            f"{did_you_mean(name, names)}"
        )


def _source(module: str) -> Path | None:
    """Return the file of a module; None where it is not here, or is one of Python or verifiers."""
    top, *inner = module.split(".")
    spec = None if top in _NOT_OWN else _spec(top)
    if spec is None or not inner:
        return Path(spec.origin) if spec and spec.origin else None
    roots = [Path(root, *inner) for root in spec.submodule_search_locations or ()]
    files = (file for root in roots for file in (root / "__init__.py", root.with_suffix(".py")))
    return next((file for file in files if file.is_file()), None)


def _bound_names(code: str) -> set[str] | None:
    """Return the names that code binds at the top; None where it may bind others as it runs, or is no Python."""
    if _BINDS_UNSEEN.search(code):
        return None
    try:
        symbols = symtable.symtable(code, "", "exec").get_symbols()
    except (SyntaxError, ValueError):
        return None
    return {
        name.get_name() for name in symbols if name.is_assigned() or name.is_imported() or name.is_declared_global()
    }


def _data(environment: Section) -> Iterator[str]:
    """Yield name and digest of each file that a setting names, and of the directory or pattern that `path` names."""
    for key, text in _texts(environment):
        # A word, as the name of a split is, is no path.
        if key not in ("path", "files", "command") and not {"/", "."} & {*text}:
            continue
        path = Path(os.path.expanduser(text))
        # By content and not by date: a file that is copied or checked out again is the same input.
        if os.path.isfile(path):
            yield _file_part(path)
        elif key == "path" and text and os.path.isdir(path):
            yield f"{path.name}/ sha256:{_digest(_tree(path))[:SHOWN]}"
        elif key == "path" and (files := [*filter(Path.is_file, map(Path, glob(f"{path}", recursive=True)))]):
            yield f"{path.name} sha256:{_digest((file.name, file) for file in files)[:SHOWN]}"


def _file_part(file: Path) -> str:
    return f"{file.name} sha256:{file_digest(file)[:SHOWN]}"


def _texts(environment: Section) -> Iterator[tuple[str, str]]:
    """Yield key and value of every text among the settings of an environment's plug-ins, at any depth."""
    seats = [seat["harness"] for seat in environment["seats"].values()]
    names = ("taskset", "harness", "env", "group_rewards")
    queue: list[tuple[str, Any]] = [("", environment[name]) for name in names]
    if bindings := environment.get("bindings"):
        queue.append(("function", bindings["function"]))
    queue += [("", harness) for harness in seats]
    for key, value in queue:  # which grows meanwhile
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, Mapping):
            queue += [(str(name), entry) for name, entry in value.items()]
        elif isinstance(value, Sequence):
            queue += [(key, entry) for entry in value]


def module_digest(module: str) -> str:
    """Return the SHA-256 of the files of a top-level module, by their names in it; of a package with all its data."""
    return _digest(_module_files(module))


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for inside, file in sorted(files):
        digest.update(f"{inside}\0{file_digest(file)}\0".encode())
    return digest.hexdigest()


def _module_files(module: str) -> list[tuple[str, Path]]:
    """Return the files of a module with their names inside it."""
    spec = _spec(module)
    if spec is None:
        return []
    if spec.submodule_search_locations is None:
        file = Path(spec.origin or "")
        return [(file.name, file)] if file.is_file() else []
    return [entry for root in spec.submodule_search_locations for entry in _tree(Path(root))]


def _tree(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files below a directory with their names inside it, but hidden and compiled ones."""
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if not name.startswith(".") and name != "__pycache__"]
        for file in (Path(directory, name) for name in files if not name.startswith(".")):
            if file.suffix not in _COMPILED and file.is_file():
                yield file.relative_to(root).as_posix(), file


def _spec(module: str) -> ModuleSpec | None:
    """Return where a process of an environment finds a top-level module; None where there is none."""
    here = os.getcwd()
    # It looks in the current directory last, whether this process does so first, last or not at all.
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [place for place in sys.path if place and (place != here or here in named)]
    for finder in sys.meta_path:
        spec = finder.find_spec(module, [*path, here] if finder is PathFinder else None)
        # What has no code of its own, as a directory of that name, is no match.
        if spec is not None and (spec.origin is not None or finder is not PathFinder):
            return spec
    return None


def _imports_of(files: Iterable[Path]) -> list[str]:
    """Return the top-level modules that files of code import and that count as code of the environment, sorted."""
    names = {name for file in files if file.suffix == ".py" for name in _imports(file.read_bytes())}
    return sorted(name for name in names if _is_own_code(name))


@lru_cache(maxsize=4096)
def _imports(code: bytes) -> frozenset[str]:
    """Return the names of the top-level modules that code imports, wherever in it; none where it is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError):  # the environment's own process says it better
        return frozenset()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level and node.module]
    return frozenset({name.partition(".")[0] for name in names} - _NOT_OWN)


def _is_own_code(module: str) -> bool:
    """Return whether a module lies outside of what is installed, or belongs to a package that is built on verifiers."""
    spec = _spec(module)
    files = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    place = next((Path(file).parent for file in files if file and os.path.exists(file)), None)
    if place is None:  # not there, as something optional may be, or no file
        return False
    if not any(place.glob("*.dist-info")):  # no directory that packages are installed in
        return True
    name = _distribution_of(module)
    return bool(name) and any(map(_NEEDS_VERIFIERS.match, distribution(name).requires or ()))

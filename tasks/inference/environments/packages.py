"""Packages of environments: names, versions and a digest of all code and data that make their rows; none is imported.

A version alone does not name code: that of a checkout stays while its code is edited, and two packages may share one.
"""

import ast
import hashlib
import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, distribution, distributions, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import did_you_mean, differing_parts
from tasks.runtime.imports import DISTRIBUTION

if TYPE_CHECKING:
    from configs.environments import EnvironmentConfig

Section = Mapping[str, Any]
"""An environment's section as plain values: a process that serves it has no need of the config's models."""
SHOWN = 16
"""Hexadecimal digits of a digest: 64 bits, since nobody gains from two packages that share them."""
LARGE = 1 << 20
"""Bytes of a file from which on it is read once in a process, unless its size, date or inode change."""
# An import path of a function, in a module or in a file of its own.
_FUNCTION = re.compile(r"(?P<place>[^:\n]+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")
_DEFINES_TASKSET = re.compile(r"^class \w+\([\w.]*Taskset\b", re.MULTILINE)
_NEEDS_VERIFIERS = re.compile(r"verifiers\b(?!.*\bextra\b)")
_NOT_OWN = sys.stdlib_module_names | {"verifiers"}
_NO_CODE = frozenset({"__pycache__"})
_COMPILED = frozenset({".pyc", ".pyo"})


INSTALL_ADVICE = (
    "Install an environment of Prime's hub with `prime env install OWNER/NAME`, by the owner and name that the hub "
    "shows, or one of the folder environments/ of verifiers' repository out of a checkout of it"
)


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
        recorded, found = differing_parts(section["version"], here)
        raise EnvironmentUnavailable(
            f"environment {section['name']!r} was edited: the run began with {recorded}, here it is {found}. No "
            "process was started with it; what was sampled is safe. Bring that code back, or start a new run with this "
            "one"
        )


def _code(environment: Section) -> Iterator[str]:
    """Yield a part for each package: those of plug-ins, of functions by import path, and what these import."""
    modules, files = _functions(environment)
    waiting: list[str] = []
    for kind, plugin, group in _plugins(environment):
        name, module = _plugin_names(environment, kind, str(plugin.get("id", "")))
        if _of_verifiers(module, group):
            yield f"verifiers {version('verifiers')}"
            continue
        yield f"{_label(environment, kind, name, module, group)} sha256:{module_digest(module)[:SHOWN]}"
        waiting.append(module)
    for file in files:
        yield f"{file.name} sha256:{_file_digest(file)[:SHOWN]}"
        modules += _imports_of([(file.name, file)])
    known = dict.fromkeys(waiting)
    waiting += modules
    for module in waiting:  # which grows meanwhile
        if module not in known:
            known[module] = None
            yield f"{_name_of(module)} sha256:{module_digest(module)[:SHOWN]}"
        waiting += [each for each in _imports_of(_module_files(module)) if each not in waiting]


def _plugins(environment: Section) -> list[tuple[str, Mapping[str, Any], str]]:
    """Return kind, settings and group of the plug-ins that an environment consists of."""
    plugins: list[tuple[str, Mapping[str, Any], str]] = [
        ("taskset", environment["taskset"], "tasksets"),
        ("harness", environment["harness"], "harnesses"),
    ]
    if environment["env"].get("id"):
        plugins.append(("env", environment["env"], "envs"))
    own = {f"seats.{name}.harness": seat["harness"] for name, seat in environment["seats"].items()}
    own |= {f"env.{name}.harness": _harness_settings(each) for name, each in environment["env"].items()}
    plugins += [(kind, harness, "harnesses") for kind, harness in own.items() if harness]
    judges = task.get("judges") if isinstance(task := environment["taskset"].get("task"), Mapping) else None
    return plugins + [("judge", judge, "judges") for judge in judges or () if isinstance(judge, Mapping)]


def _harness_settings(settings: Any) -> dict[str, Any]:
    """Return the harness that an environment's own settings name for a seat; empty where they name none."""
    harness = settings.get("harness") if isinstance(settings, dict) else None
    return harness if isinstance(harness, dict) and "id" in harness else {}


def _plugin_names(environment: Section, kind: str, plugin: str) -> tuple[str, str]:
    """Return the names of a plug-in's distribution and of its module, from its id: owner/name@version, or a name."""
    if not plugin:
        raise EnvironmentUnavailable(f"environment {environment['name']!r}: {kind}.id is missing; it names a package")
    name = plugin.rsplit("/", 1)[-1].split("@", 1)[0]
    return name, name.replace("-", "_").lower()


def installed_tasksets() -> list[str]:
    """Return the ids of the tasksets that are installed: those of verifiers, and of packages that define one."""
    return [module for module in _plugin_modules("tasksets") if _defines_taskset(module)]


def _defines_taskset(module: str) -> bool:
    if _of_verifiers(module, "tasksets"):
        return True
    files = (path for name, path in _module_files(module) if name.endswith(".py")) if _spec(module) else ()
    return any(_DEFINES_TASKSET.search(path.read_text(encoding="utf-8", errors="replace")) for path in files)


def _of_verifiers(module: str, group: str) -> bool:
    """Tell whether a plug-in is one that comes with verifiers, which looks there first."""
    return any(Path(folder, module).exists() for folder in _verifiers_folders(group))


def _verifiers_folders(group: str) -> list[Path]:
    verifiers = find_spec("verifiers")
    return [Path(root, "v1", group) for root in (verifiers.submodule_search_locations or () if verifiers else ())]


def _plugin_modules(group: str) -> list[str]:
    """Return the modules that a plug-in may be: those of verifiers, and of packages that are built on it."""
    inside = [module.stem for folder in _verifiers_folders(group) for module in folder.glob("[a-z]*")]
    own = [
        each.metadata["Name"].replace("-", "_").lower()
        for each in distributions()
        if any(map(_NEEDS_VERIFIERS.match, each.requires or ()))
    ]
    # Of our wheel, which brings several packages.
    ours = [module for module, owners in packages_distributions().items() if DISTRIBUTION in owners]
    return sorted({*inside, *own, *(each for each in ours if each.startswith("sample_"))})


def _label(environment: Section, kind: str, name: str, module: str, group: str) -> str:
    """Return name and version of a plug-in's distribution. Raises EnvironmentUnavailable where there is no module."""
    if _spec(module) is None:
        near = get_close_matches(module, _plugin_modules(group), 1)
        installed = f"Installed: {', '.join(installed_tasksets())}. " if group == "tasksets" else ""
        # The id names no package of a registry: there a stranger may have the name.
        advice = f"Did you mean {near[0]!r}, which is installed?" if near else f"{installed}{INSTALL_ADVICE}"
        raise EnvironmentUnavailable(
            f"environment {environment['name']!r}: {kind} {name!r} is not installed: there is no module {module!r}. "
            f"{advice}"
        )
    try:
        return f"{name.replace('_', '-')} {version(name)}"
    except PackageNotFoundError:
        return _name_of(module)


def _name_of(module: str) -> str:
    """Return name and version of the distribution that has a module, or what says that there is none."""
    name = _distribution_of(module)
    if name == DISTRIBUTION:
        # Our wheel brings the samples, which are packages of their own in a checkout: in keys both have one name.
        return f"{module.replace('_', '-')} {version(name)}"
    return f"{name} {version(name)}" if name else f"{module} (not a package)"


def _distribution_of(module: str) -> str:
    try:
        # The usual case, in no time: to go through everything that is installed takes a fifth of a second.
        return distribution(module.replace("_", "-")).metadata["Name"].replace("_", "-")
    except PackageNotFoundError:
        dates = tuple(os.stat(each).st_mtime_ns for each in sys.path if os.path.isdir(each))
        return next(iter(_distributions(dates).get(module, ())), "")


@lru_cache(maxsize=1)
def _distributions(dates: tuple[int, ...]) -> Mapping[str, list[str]]:
    """Return the distributions of all modules; `dates`, of the directories looked in, change with what is installed."""
    return packages_distributions()


def _functions(environment: Section) -> tuple[list[str], list[Path]]:
    """Return the top-level modules, and the files, of functions that settings name by import path.

    Raises EnvironmentUnavailable for a file that is missing, and for a function that the source of its module does not
    have; a missing module is left to the process that loads it.
    """
    modules, files = [], []
    for key, text in _texts(environment):
        match = _FUNCTION.fullmatch(text)
        place = match["place"] if match else text if key == "fn" else ""
        if match:
            _require_function(environment, text, match["place"], match["name"])
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
    file = Path(place) if place.endswith(".py") else _source_of(place)
    names = _defined_names(file.read_bytes()) if file is not None and file.is_file() else None
    if names is not None and name not in names:
        raise EnvironmentUnavailable(
            f"environment {environment['name']!r}: {text!r} names no function: {file} has no "
            f"{name!r}{did_you_mean(name, names)}"
        )


def _source_of(module: str) -> Path | None:
    """Return the file of a module with code of its own; None where it is not here, or belongs to no environment."""
    top, *inner = module.split(".")
    spec = None if top in _NOT_OWN else _spec(top)
    if spec is None or not inner:
        return Path(spec.origin) if spec and spec.origin else None
    roots = [Path(root, *inner) for root in spec.submodule_search_locations or ()]
    files = (file for root in roots for file in (root.with_suffix(".py"), root / "__init__.py"))
    return next((file for file in files if file.is_file()), None)


@lru_cache(maxsize=64)
def _defined_names(code: bytes) -> frozenset[str] | None:
    """Return all names that code binds, wherever in it; None where it may bind others as it runs, or is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError):
        return None
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.asname or node.name.partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    return None if {"*", "__getattr__", "globals"} & names else frozenset(names)


def _data(environment: Section) -> Iterator[str]:
    """Yield name and digest of each file that a setting names, and of the directory that one called `path` names."""
    for key, text in _texts(environment):
        if key != "path" and not {"/", "."} & {*text}:  # a word, as the name of a split is, and no path
            continue
        path = os.path.expanduser(text)
        # By content and not by date: a file that is copied or checked out again is the same input.
        if os.path.isfile(path):
            yield f"{Path(path).name} sha256:{_file_digest(Path(path))[:SHOWN]}"
        elif key == "path" and text and os.path.isdir(path):
            yield f"{Path(path).name}/ sha256:{_digest(list(_tree(Path(path))))[:SHOWN]}"


def _texts(environment: Section) -> Iterator[tuple[str, str]]:
    """Yield key and value of every text among the settings of an environment's plug-ins, at any depth."""
    seats = [each["harness"] for each in environment["seats"].values()]
    waiting: list[tuple[str, Any]] = [
        ("", each) for each in (environment["taskset"], environment["harness"], environment["env"], *seats)
    ]
    for key, value in waiting:  # which grows meanwhile
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, Mapping):
            waiting += [(str(name), each) for name, each in value.items()]
        elif isinstance(value, Sequence):
            waiting += [(key, each) for each in value]


def module_digest(module: str) -> str:
    """Return the SHA-256 of the files of a top-level module, by their names in it; of a package with all its data."""
    return _digest(_module_files(module))


def _digest(files: Sequence[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for inside, file in sorted(files):
        digest.update(f"{inside}\0{_file_digest(file)}\0".encode())
    return digest.hexdigest()


def _module_files(module: str) -> list[tuple[str, Path]]:
    """Return the files of a module with their names inside it."""
    spec = _spec(module)
    if spec is None:
        return []
    if spec.submodule_search_locations is None:
        file = Path(spec.origin or "")
        return [(file.name, file)] if file.is_file() else []
    found = []
    for root in map(Path, spec.submodule_search_locations):
        listed = _wheel_files(root)
        found += [each for each in _tree(root) if not listed or each[0] in listed]
    return found


def _wheel_files(root: Path) -> set[str]:
    """Return the names of a package's files that came with its wheel; empty where it was not installed from one.

    What an installed package writes beside them as it runs, data that it fetched say, is no code.
    """
    name = _distribution_of(root.name)
    if not name or Path(str((installed := distribution(name)).locate_file(""))).resolve() != root.parent.resolve():
        return set()
    files = (each.as_posix().partition("/") for each in installed.files or ())
    return {inside for top, _, inside in files if top == root.name}


def _tree(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files below a directory with their names inside it, but hidden and compiled ones."""
    for directory, names, files in os.walk(root):
        names[:] = [each for each in names if not each.startswith(".") and each not in _NO_CODE]
        for file in (Path(directory, each) for each in files if not each.startswith(".")):
            if file.suffix not in _COMPILED and file.is_file():
                yield file.relative_to(root).as_posix(), file


def _spec(module: str) -> ModuleSpec | None:
    """Return where a process of an environment finds a top-level module; None where there is none."""
    here = os.getcwd()
    # It looks in the current directory last, whether this process does so first, last or not at all.
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [each for each in sys.path if each and (each != here or here in named)]
    for finder in sys.meta_path:
        found = finder.find_spec(module, [*path, here] if finder is PathFinder else None)
        # What has no code of its own, as a directory of that name, is no match.
        if found is not None and (found.origin is not None or finder is not PathFinder):
            return found
    return None


def _imports_of(files: Sequence[tuple[str, Path]]) -> list[str]:
    """Return the top-level modules that files of code import and that count as code of the environment, sorted."""
    names = {name for _, file in files if file.suffix == ".py" for name in _imports(file.read_bytes())}
    return sorted(name for name in names if _is_own_code(name))


@lru_cache(maxsize=4096)
def _imports(code: bytes) -> frozenset[str]:
    """Return the names of the top-level modules that code imports, wherever in it; none where it is no Python."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):  # the environment's own process says it better
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return frozenset(found - _NOT_OWN)


def _is_own_code(module: str) -> bool:
    """Tell whether a module lies outside of what is installed, or belongs to a package that is built on verifiers."""
    spec = _spec(module)
    files = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    place = next((Path(each).parent for each in files if each and os.path.exists(each)), None)
    if place is None:  # not there, as something optional may be, or no file
        return False
    if not any(place.glob("*.dist-info")):  # no directory that packages are installed in
        return True
    name = _distribution_of(module)
    return bool(name) and any(map(_NEEDS_VERIFIERS.match, distribution(name).requires or ()))


def _file_digest(file: Path) -> str:
    found = file.stat()
    if found.st_size < LARGE:  # not by its date: what is edited twice in a moment may have the same
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return _large_file_digest(file, found.st_size, found.st_mtime_ns, found.st_ino)


@lru_cache(maxsize=4096)
def _large_file_digest(file: Path, size: int, mtime_ns: int, inode: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()

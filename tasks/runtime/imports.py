"""Imports of functions by their path, `package.module:function`, with a version of their code.

Modules are looked for where Python looks, and then in the current working directory.
"""

import functools
import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from importlib.metadata import Distribution, distribution, packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

DISTRIBUTION = "stagecoach-rl"
"""The name under which this program is installed; on PyPI, `stagecoach` is another project."""
_distributions = functools.cache(packages_distributions)
_DIGESTS: dict[str, str] = {}
"""Digest of the file of each module when it was first loaded here, by the module's name."""


class NotImportable(ValueError):
    """An import path names nothing that can be loaded and called, or other code than was loaded from it."""


def load_function(path: str) -> Callable[..., Any]:
    """Return the function that an import path names.

    Raises NotImportable where the path has another form, the module or what it imports is missing or fails as it is
    loaded, it has no such name or one that cannot be called, or its file was edited since this process loaded it.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier():
        raise NotImportable(f"{path!r} is no import path; write it as package.module:function")
    module = _module(module_name, path)
    found = getattr(module, name, None)
    if not callable(found):
        what = f"{name!r} there cannot be called" if hasattr(module, name) else f"it has no {name!r}"
        raise NotImportable(f"{path!r}: module {module_name} ({_file(module)}) was loaded, but {what}")
    return found  # type: ignore[no-any-return]


def load_version(path: str, version: str) -> Callable[..., Any]:
    """Return the function that an import path names, of the version that a config was resolved with; empty is any.

    Raises NotImportable as `load_function` does, and where the code here is of another version: what it makes would be
    recorded under the name of the other.
    """
    found = load_function(path)
    if version and version != (here := code_version(path)):
        raise NotImportable(
            f"{path!r} is {here} here, and the config was resolved with {version}. Nothing was computed; all that was "
            "sampled is safe. Bring that code back, or start a new run with this one"
        )
    return found


def code_version(path: str) -> str:
    """Return what names the version of a function's code: `name version` of the installed distribution that holds its
    module's file, else `sha256:` and the digest of that file.

    What an undistributed module imports from beside it is not in the digest: keep such a function in one file, or
    install its package. Raises NotImportable as `load_function` does.
    """
    load_function(path)
    module = sys.modules[path.partition(":")[0]]
    file = _file(module)
    if file is None:
        raise NotImportable(f"{path!r}: module {module.__name__} has no file, so that its code has no version")
    return _release(module.__name__, file) or f"sha256:{_digest(file)}"


def look_in_working_directory() -> None:
    """Let Python look for modules in the working directory too: last, so that none stands in for an installed one."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def _module(name: str, path: str) -> ModuleType:
    look_in_working_directory()
    # The module may have been written a moment ago, as in a notebook.
    importlib.invalidate_caches()
    if name not in sys.modules:
        # Whoever removed it from `sys.modules` wants it loaded anew.
        _DIGESTS.pop(name, None)
    try:
        module = importlib.import_module(name)
    # Code of others may raise anything as it is loaded; the error names the path and keeps the cause.
    except Exception as error:
        raise NotImportable(f"{path!r}: module {name!r} does not load: {type(error).__name__}: {error}") from error
    file = _file(module)
    if file is not None and _DIGESTS.setdefault(name, digest := _digest(file)) != digest:
        raise NotImportable(f"{path!r}: {file} was edited since this process loaded it; start a new process")
    return module


def _file(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _release(module: str, file: Path) -> str:
    """Return `name version` of the installed distribution that holds a module's file; empty where none does."""
    for name in _distributions().get(module.partition(".")[0], ()):
        if _contains(installed := distribution(name), file):
            return f"{installed.metadata['Name']} {installed.version}"
    return ""


def _contains(installed: Distribution, file: Path) -> bool:
    # A checkout, installed as editable or not, names its packages too, and its version stays when the code changes.
    if installed.read_text("RECORD") is None:
        return False
    named = (each for each in installed.files or () if each.name == file.name)
    return any(Path(str(installed.locate_file(path))).resolve() == file for path in named)

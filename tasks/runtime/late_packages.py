"""Packages that are there and whose own code runs when it is needed: some import for seconds what few ask for."""

import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

KNOWN_LATER = ("__version__", "__all__")
"""Names with underscores that only a package's own code gives; the others are asked of every module that there is."""


def import_late(name: str, homes: Mapping[str, str] | None = None, functions: Sequence[str] = ()) -> None:
    """Let `import name` succeed without running the package's `__init__`.

    Does nothing where the package is imported already, or it or its parent is not to be had.

    Submodules are imported as ever. `homes` gives for names of the package the module that defines them: they are
    imported from there. `functions` are given as functions that import the package when they are called. Whatever else
    is asked of the package runs its `__init__`, once, and raises what that raises.
    """
    parent = name.rpartition(".")[0]
    if name in sys.modules or (parent and parent not in sys.modules):
        return
    with suppress(ImportError):  # of a finder that refuses: whoever imports the package gets the error
        if spec := find_spec(name):
            _put_late(spec, _Late(homes or {}, functions))


def _put_late(spec: ModuleSpec, late: "_Late") -> None:
    parent, _, child = spec.name.rpartition(".")
    package = module_from_spec(spec)
    package.__class__ = _LatePackage
    vars(package)["_late"] = late
    sys.modules[spec.name] = package
    if parent:
        setattr(sys.modules[parent], child, package)


class _Late:
    """What is known of a package whose code has not run."""

    def __init__(self, homes: Mapping[str, str], functions: Sequence[str]) -> None:
        self.homes = homes
        self.functions = functions
        self.lock = threading.RLock()
        self.is_running = False


class _LatePackage(ModuleType):
    """A module without its own code; only names that it lacks are asked of it."""

    def __getattr__(self, name: str) -> Any:
        late: _Late = vars(self)["_late"]
        if name in late.homes:
            return getattr(import_module(late.homes[name]), name)
        if name in late.functions:
            return lambda *given, **named: getattr(_run(self, name), name)(*given, **named)
        if name.startswith("__") and name not in KNOWN_LATER:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(_run(self, name), name)


def _run(package: ModuleType, name: str) -> ModuleType:
    """Run a package's own code, unless another thread has; afterwards it is a module as any.

    Raises AttributeError where that code itself asks for a name that it has not made yet.
    """
    late: _Late = vars(package)["_late"]
    with late.lock:
        if late.is_running:
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r} yet")
        if isinstance(package, _LatePackage):
            assert package.__spec__ is not None and package.__spec__.loader is not None
            late.is_running = True
            try:
                package.__spec__.loader.exec_module(package)
            finally:
                late.is_running = False
            package.__class__ = ModuleType  # type: ignore[assignment]
    return package

"""Packages that are there and whose own code runs when it is needed: some import for seconds what few ask for."""

import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

KNOWN_LATER = ("__version__", "__all__", "__doc__")
"""Names with underscores that only a package's own code gives; the others are asked of every module that there is."""


def import_late(name: str, homes: Mapping[str, str] | None = None, functions: Sequence[str] = ()) -> None:
    """Let `import name` succeed without running the package's `__init__`; done already, or not installed: do nothing.

    Submodules are imported as ever. `homes` gives for names of the package the module that defines them: they are
    imported from there. `functions` are given as functions that import the package when they are called. Whatever else
    is asked of the package runs its `__init__`, once, and raises what that raises.
    """
    if name in sys.modules or (spec := find_spec(name)) is None:
        return
    package = module_from_spec(spec)
    package.__class__ = _LatePackage
    vars(package)["_late"] = _Late(homes or {}, functions)
    sys.modules[name] = package
    parent, _, child = name.rpartition(".")
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
            return lambda *given, **named: getattr(_run(self), name)(*given, **named)
        is_of_all = name.startswith("__") and name not in KNOWN_LATER
        with late.lock:
            if is_of_all or late.is_running:  # by this thread, whose import looks for a name that is not there yet
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            return getattr(_run(self), name)


def _run(package: ModuleType) -> ModuleType:
    """Run a package's own code, unless another thread has; afterwards it is a module as any."""
    late: _Late = vars(package)["_late"]
    with late.lock:
        is_late = isinstance(package, _LatePackage)
        if is_late and not late.is_running:
            spec = package.__spec__
            assert spec is not None and spec.loader is not None
            late.is_running = True
            try:
                spec.loader.exec_module(package)
            finally:
                late.is_running = False
            package.__class__ = ModuleType
    return package

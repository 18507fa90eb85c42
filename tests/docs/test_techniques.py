"""The product gains no time by tricks of imports, of the garbage collector and of other people's classes."""

import ast
from pathlib import Path

import pytest

from flows import PACKAGES

ROOT = Path(__file__).parents[2]
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
FILES += [ROOT / "stagecoach.py", *sorted((ROOT / "requirements").glob("*.py"))]
THREADS = {"Thread": "target", "Timer": "function", "submit": "", "to_thread": "", "start_new_thread": ""}
"""Calls that run a function in another thread, and the keyword that names the function."""
REMAINING = {
    # The whole program runs in that thread where the caller's thread runs an event loop, and the caller waits for it.
    "stagecoach.py": {"a thread that imports"},
}
"""Places that are still to be mended: this list may only shrink."""


def name_of(node):
    """Return the last part of a name: `freeze` of `gc.freeze`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def dotted(node):
    """Return a name with its dots; empty for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".strip(".")
    return getattr(node, "id", "")


def techniques(tree):
    """Yield the techniques that a file uses."""
    functions = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node) in ("gc.disable", "gc.freeze", "gc.set_threshold"):
            yield dotted(node)
        if isinstance(node, ast.Call):
            if dotted(node.func).startswith("sys.meta_path."):
                yield "sys.meta_path"
            if (thread := name_of(node.func)) in THREADS:
                named = [each.value for each in node.keywords if each.arg == THREADS[thread]]
                if any(imports(functions.get(name_of(each))) for each in [*node.args, *named]):
                    yield "a thread that imports"
        for target in targets_of(node):
            if dotted(target).startswith("sys.meta_path"):
                yield "sys.meta_path"
            if isinstance(target, ast.Subscript) and dotted(target.value) == "sys.modules":
                yield "sys.modules[...] ="
            if isinstance(target, ast.Attribute) and target.attr == "__class__":
                yield "__class__ ="


def targets_of(node):
    """Return what an assignment assigns to."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def imports(function):
    """Tell whether a function has an import in its body."""
    return function is not None and any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(function))


def test_no_file_uses_a_forbidden_technique():
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    uses = {path: set(techniques(tree)) for path, tree in trees.items()}
    assert {path: used for path, used in uses.items() if used} == REMAINING


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import gc\ngc.disable()", "gc.disable"),
        ("import gc\ngc.freeze()", "gc.freeze"),
        ("import sys\nsys.meta_path.insert(0, Finder)", "sys.meta_path"),
        ("import sys\nsys.meta_path = [Finder]", "sys.meta_path"),
        ("import sys\nsys.modules[name] = package", "sys.modules[...] ="),
        ("package.__class__ = Late", "__class__ ="),
        ("def load():\n    import torch\nthreading.Thread(target=load).start()", "a thread that imports"),
        ("def load():\n    import torch\npool.submit(load)", "a thread that imports"),
    ],
)
def test_a_forbidden_technique_is_seen(code, expected):
    assert list(techniques(ast.parse(code))) == [expected]

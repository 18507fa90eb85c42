"""The structure of the product: sizes, names used once, and no files that import in a circle."""

import ast
import re
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "storage", "tasks", "flows")
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 500, 60
HEAPS = {"utils", "common", "helpers", "misc", "types"}
"""Names of modules that say nothing of what is in them."""


IRREGULAR = re.findall(
    r"\w+",
    "asked begun bought broken built chosen dealt done drawn felt found given gone grown held kept known laid left lost"
    " made meant met named said seen sent shown sold sought split spoken stuck taken thrown told won written",
)
ADJECTIVES = {"pinned"}
"""Contexts: what holds within their block."""


@cache
def trees():
    """Every file of the product, parsed."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {file.relative_to(ROOT): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def definitions():
    """Every class and every function of the product, with its file."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield file, node


def test_a_class_name_is_used_once():
    names = Counter(node.name for _, node in definitions() if isinstance(node, ast.ClassDef))
    assert len(names) > 300
    assert {name for name, count in names.items() if count > 1} == set()


def test_files_and_functions_have_a_size_that_one_reads():
    long = {str(file) for file in trees() if len((ROOT / file).read_text().splitlines()) > MOST_LINES}
    for file, node in definitions():
        assert node.end_lineno is not None
        if not isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno >= MOST_LINES_OF_A_FUNCTION:
            long.add(f"{file}: {node.name}")
    assert long == set()


def test_a_module_is_named_after_what_is_in_it():
    assert [str(file) for file in trees() if HEAPS & {*file.parts[:-1], file.stem}] == []


def test_functions_are_called_after_what_they_do_or_return():
    """No bare participles, which say neither; properties, contexts and a plug-in's own function may have such names."""
    found = set()
    for file, node in definitions():
        name = node.name.lstrip("_")
        participle = name in IRREGULAR or (name.endswith("ed") and name not in {"speed", "feed", "seed"})
        if isinstance(node, ast.ClassDef) or "_" in name or not participle or name in {*ADJECTIVES, file.stem}:
            continue
        if not any("property" in ast.unparse(each) for each in node.decorator_list):
            found.add(f"{file}: {node.name}")
    assert found == set()


def test_no_files_import_in_a_circle():
    """Imports for types alone and those inside functions count; `prepare` raises and names a circle."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    # One import for types alone and one inside a function: the graph must have both kinds.
    assert "flows.runtime.session" in imports["flows.runtime.executor"]
    assert "flows.replays.loop" in imports["flows.cli.run"]
    TopologicalSorter(imports).prepare()


@pytest.mark.parametrize("file", sorted((ROOT / "tests").rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_helpers_come_from_no_file_of_tests(file):
    assert re.findall(r"^\s*(?:from|import) tests\.(?:\w+\.)*test_\w+", file.read_text(), re.MULTILINE) == []

"""The wheel's sources name our modules below `stagecoach`, in imports and in strings; one list has the strings."""

import ast
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("build_backend", ROOT / "requirements/build_backend.py")
assert spec is not None and spec.loader is not None
build_backend = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_backend)
PACKAGES = build_backend.PACKAGES.split("|")
FILES = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))] + [ROOT / "stagecoach.py"]
STRINGS = {
    "flows/cli/runs.py",  # names of commands of this program, among processes
    "flows/cli/init.py",
    "flows/exchange/export.py",
    "flows/queries/condition_process.py",
    "flows/services/pools.py",
    "stagecoach.py",  # classes that plug-ins name
    "tasks/inference/engine/command.py",
    "tasks/inference/engine/host.py",  # vLLM's factory of weight transfers imports by name
    "tasks/inference/environments/servers.py",
    "tasks/inference/grading/client.py",
    "tasks/learner/client.py",
    "tasks/training/policy.py",
}
"""Files in which strings name modules: all but those commented start one as a program."""


def imported(tree):
    """Return the top-level modules that a file imports."""
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in names}


def test_relocated_files_import_ours_from_stagecoach():
    for path in FILES:
        text = path.read_text("utf-8")
        before, after = imported(ast.parse(text)), imported(ast.parse(build_backend.relocated(text, ROOT)))
        assert not after & {*PACKAGES} and ("stagecoach" in after) == bool(before & {*PACKAGES}), path


def test_strings_that_name_modules_are_in_the_listed_files():
    name = re.compile(rf"(?:{'|'.join(PACKAGES)})(\.\w+)+(:\w+)?")

    def names_a_module(node):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or not name.fullmatch(node.value):
            return False
        place = ROOT / node.value.partition(":")[0].replace(".", "/")
        return place.is_dir() or place.with_suffix(".py").is_file()

    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in FILES}
    assert {path for path, tree in trees.items() if any(map(names_a_module, ast.walk(tree)))} <= STRINGS
    texts = [build_backend.relocated(f'x = "{name}"', ROOT) for name in ("flows.cli", "tasks.none", "storage.stores:a")]
    assert texts == ['x = "stagecoach.flows.cli"', 'x = "tasks.none"', 'x = "storage.stores:a"']


def test_prefect_s_entry_points_are_relocated():
    text = build_backend.relocated((ROOT / "flows/orchestration/prefect.yaml").read_text("utf-8"), ROOT)
    entries = re.findall("entrypoint: (.*)", text)
    assert len(entries) > 5 and all(entry.startswith("stagecoach.flows.") for entry in entries)

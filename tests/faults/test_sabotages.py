"""The list of sabotages fits the program: each edit can be made, and the tests that must catch it are there."""

import re

import pytest

from tests.faults.sabotage import ROOT, sabotaged, sabotages
from tests.mutation.mutate import COPIED


@pytest.mark.parametrize("sabotage", sabotages(), ids=lambda each: each.name)
def test_a_sabotage_changes_a_file_that_still_compiles(sabotage):
    good = (ROOT / sabotage.file).read_text()
    bad = sabotaged(good, sabotage.edits)
    assert bad != good
    compile(bad, sabotage.file, "exec")
    for tests in sabotage.tests:
        assert "pytest.mark.fault(" in (ROOT / tests).read_text()


def test_there_are_twenty():
    assert len({each.name for each in sabotages()}) >= 20


def test_what_is_copied_holds_all_that_tests_import():
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    imported = {name for text in texts for name in re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE)}
    ours = {path.name for name in imported for path in (ROOT / name, ROOT / f"{name}.py") if path.exists()}
    assert {"benchmarks", "stagecoach.py", "tasks"} <= ours <= set(COPIED)
    assert all((ROOT / name).exists() for name in COPIED)

"""The list of sabotages fits the program: each edit can be made, and the tests that must catch it are there."""

import pytest

from tests.faults.sabotage import COPIED, ROOT, Sabotage, sabotaged, sabotages


@pytest.mark.parametrize("sabotage", sabotages(), ids=lambda each: each.name)
def test_a_sabotage_changes_a_file_that_still_compiles(sabotage: Sabotage) -> None:
    good = (ROOT / sabotage.file).read_text()
    bad = sabotaged(good, sabotage.edits)
    assert bad != good
    compile(bad, sabotage.file, "exec")
    for tests in sabotage.tests:
        assert "pytest.mark.fault(" in (ROOT / tests).read_text()


def test_there_are_twenty() -> None:
    assert len({each.name for each in sabotages()}) >= 20


def test_what_is_copied_holds_every_package_of_the_program() -> None:
    assert all((ROOT / name).exists() for name in COPIED)
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} <= set(COPIED)

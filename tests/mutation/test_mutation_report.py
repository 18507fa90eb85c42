"""The report of a mutation run: what is counted, and what is called enough."""

import tomllib
from collections import Counter

import pytest

from tests.mutation.mutate import ROOT, changes, counted, statuses
from tests.mutation.report import GROUPS, Survivor, group_of, page

PRINTED = """\
    tasks.learner.losses.gspo.x_gspo__mutmut_1: killed
    tasks.advantage.algorithms.groups.xǁGroupsǁof__mutmut_2: survived
    tasks.advantage.algorithms.groups.xǁGroupsǁof__mutmut_3: timeout
    tasks.packing.bin_packing.x__spread__mutmut_4: no tests
"""


def test_mutants_are_counted_by_module_and_status():
    assert counted(statuses(PRINTED)) == {
        "tasks.advantage.algorithms.groups": {"survived": 1, "timeout": 1},
        "tasks.packing.bin_packing": {"no tests": 1},
        "tasks.learner.losses.gspo": {"killed": 1},
    }
    assert list(counted(statuses(PRINTED))) == [
        "tasks.advantage.algorithms.groups",
        "tasks.packing.bin_packing",
        "tasks.learner.losses.gspo",
    ]


def test_what_a_mutant_changed_is_one_line():
    shown = "# a: survived\n--- a.py\n+++ a.py\n@@ -1 +1 @@\n def f():\n-    g(\n-        1)\n+    g(\n+        2)\n"
    assert changes(shown) == ("g( 1)", "g( 2)")


@pytest.mark.parametrize(
    ("module", "group"),
    [
        ("tasks.advantage.algorithms.groups", "advantage"),
        ("tasks.advantage.algorithms.echo", "masks"),
        ("tasks.filtering.filters", "masks"),
        ("tasks.arrays.finding", "masks"),
        ("tasks.learner.losses.gspo", "loss"),
        ("tasks.learner.head", "loss"),
        ("tasks.evaluation.confidence", "evaluation"),
        ("tasks.advantage.reference", "advantage"),
    ],
)
def test_a_module_is_of_the_group_of_its_nearest_name(module, group):
    assert group_of(module) == group


@pytest.mark.parametrize(("survived", "enough"), [(2, True), (3, False)])
def test_enough_is_asked_of_every_group(survived, enough):
    counts = {
        "tasks.packing.bin_packing": Counter(killed=100 - survived, survived=survived),
        "tasks.advantage.stage": Counter(killed=900),
    }
    survivors = [
        Survivor("tasks.packing.bin_packing", "tasks.packing.bin_packing.pack", "a = 1", "a = 2", "It is not read."),
        Survivor("tasks.packing.bin_packing", "tasks.packing.bin_packing.f", "x", "", ""),
    ]
    text, found = page(counts, survivors, "2026-01-01, 2 cores", 7)
    assert found is enough
    assert "`make mutate`, 2026-01-01, 2 cores, mutmut" in text and " 7 other mutants were not run." in text
    assert f"| **packing** | 100 | {100 - survived} | 1 | {survived - 1} | {(100 - survived) / 99:.1%} |" in text
    assert "- `tasks.packing.bin_packing.pack`: `a = 2` for `a = 1`. It is not read." in text
    assert "- `tasks.packing.bin_packing.f`: nothing for `x`.\n" in text


def test_every_module_that_is_mutated_has_a_group():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]
    files = {path for pattern in settings["only_mutate"] for path in ROOT.glob(pattern)}
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(files)]
    assert {group_of(module) for module in modules} == set(GROUPS) and len(modules) > 40
    assert all((ROOT / path).exists() for path in settings["pytest_add_cli_args_test_selection"])

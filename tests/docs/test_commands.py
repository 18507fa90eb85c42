"""Commands of README and the tutorial pages parse, and name runs that an earlier command of the page made.

tests/acceptance/test_documents.py runs them.
"""

import re
from pathlib import Path

import pytest

from flows import cli
from tests.fixtures.documents import PAGES, Step, steps

ROOT = Path(__file__).parents[2]
FLAGS = {"--follow", "--dry-run", "--regrade", "--desc", "--plain", "--force", "--help"}
"""Options without a value."""
MAKES = {"demo", "run", "sft", "eval", "replay"}
READS = {"show", "stop", "resume", "replay", "diff", "evals", "lineage", "traces", "export"}
"""Commands whose positional arguments are runs."""
TABLES = re.compile(r"\b(?:from|join) ([a-z][\w-]*)\.\w")
PARSED = [step for page in PAGES for step in steps(page) if not step.file and step.words[0] == "stagecoach"]


def parts(words):
    """Return the positional arguments of a command, and its options by name."""
    positional, options, rest = [], {}, iter(words)
    for word in rest:
        if word.startswith("--"):
            options[word] = "" if word in FLAGS else next(rest, "")
        else:
            positional.append(word)
    return positional, options


def runs_of(step):
    """Return the runs that a command of `stagecoach` reads, and those that it makes."""
    command, *words = step.words[1:]
    positional, options = parts(words)
    reads = {word.partition(":")[0] for word in positional if command in READS and "=" not in word}
    reads |= {value.partition(":")[0] for name in ("--policy", "--run") if (value := options.get(name, ""))}
    reads |= {name for word in words if word.startswith("select") for name in TABLES.findall(word)}
    reads |= {*re.findall(r"/runs/([\w-]+)", options.get("--save", ""))}
    makes = {options["--name"]} if command in MAKES and "--name" in options else set()
    if command == "demo":
        makes |= {"demo", "demo-warm-up"}
    return reads - {"latest"}, makes


def unknown_runs(page_steps):
    """Return the commands that read runs which no earlier command made, with these runs."""
    known = set()
    missing = []
    for step in page_steps:
        if not step.file and step.words[0] == "stagecoach":
            reads, makes = runs_of(step)
            missing += [(step.text, reads - known)] if reads - known else []
            known |= makes
    return missing


@pytest.mark.parametrize("step", PARSED, ids=lambda step: f"{step.page}:{' '.join(step.words[1:])[:50]}")
def test_a_command_is_understood(step):
    cli.parse(step.words[1:])


@pytest.mark.parametrize("page", PAGES)
def test_runs_of_a_page_are_made_by_its_commands(page):
    assert unknown_runs([step for step in steps(page) if not step.reason]) == []


def test_a_run_that_no_command_made_is_noticed():
    typed = ["demo", "replay demo --set algorithm.type=rloo", "diff demo demo-rloo", "sql 'select 1 from first.traces'"]
    made = [Step("page", f"stagecoach {text}") for text in typed]
    assert [runs for _, runs in unknown_runs(made)] == [{"demo-rloo"}, {"first"}]


def test_no_page_installs_the_package_of_another_project():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    install = re.compile(r"pip install[^\n`]*(?<![\w./-])stagecoach(?![\w-])")
    assert [page.name for page in pages if install.search(page.read_text(encoding="utf-8"))] == []
    assert install.search("pip install stagecoach") and install.search('pip install "stagecoach[cpu]"')

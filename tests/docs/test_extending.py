"""The examples of the page on extending: written down as they stand there, and their own tests run on them."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+/[\w.]+)\n(.*?)```", TEXT, re.DOTALL))
TESTS = sorted(name for name in FILES if "/test_" in name)
PACKAGES = {name.partition("/")[0] for name in FILES}
MOST_LINES = {"mine": 60, "bargain": 90}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory for files of one's own, from which modules are loaded; forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]


def test_every_example_has_its_test():
    assert len(TESTS) == 5
    assert {example_of(name) for name in TESTS} == FILES.keys() - set(TESTS)


def example_of(test):
    """The file that a test is of: its namesake, or the package that it lies in."""
    file = test.replace("test_", "")
    return file if file in FILES else f"{test.partition('/')[0]}/__init__.py"


def loads_much(test):
    """Say whether an example is one for the learner or an environment, whose libraries take long to load."""
    text = FILES[test] + FILES[example_of(test)]
    return "import torch" in text or "import verifiers" in text


@pytest.mark.parametrize(
    "test", [pytest.param(test, marks=pytest.mark.engine) if loads_much(test) else test for test in TESTS]
)
def test_an_example_does_what_its_test_says(test, place):
    example = example_of(test)
    assert len((FILES[example] + FILES[test]).splitlines()) < MOST_LINES[test.partition("/")[0]]
    for name in (example, test):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(FILES[name], encoding="utf-8")
    module = importlib.import_module(test.removesuffix(".py").replace("/", "."))
    functions = [function for name, function in vars(module).items() if name.startswith("test_")]
    assert functions
    for function in functions:
        function()

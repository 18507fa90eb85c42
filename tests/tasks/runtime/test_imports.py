"""Imports by path: what is loaded, what names its version, what is refused."""

import hashlib
import sys

import pytest

from tasks.runtime.imports import NotImportable, code_version, load_function


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory off Python's path, with a module in it; modules loaded from there are forgotten after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    before = set(sys.modules)
    (tmp_path / "own_credit.py").write_text("LIMIT = 3\ndef credit(kept, settings):\n    return 'credited'\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_in_the_working_directory_is_found(here):
    assert load_function("own_credit:credit")(None, None) == "credited"


def test_an_installed_package_is_named_by_its_version():
    import numpy

    assert code_version("numpy.linalg:norm") == f"numpy {numpy.__version__}"


def test_a_module_of_no_distribution_is_named_by_its_digest(here):
    digest = hashlib.sha256((here / "own_credit.py").read_bytes()).hexdigest()
    assert code_version("own_credit:credit") == f"sha256:{digest}"


def test_a_module_that_only_has_the_name_of_an_installed_one_is_not_taken_for_it(here, monkeypatch):
    (here / "iniconfig.py").write_text("def credit(): ...\n")
    monkeypatch.delitem(sys.modules, "iniconfig", raising=False)
    monkeypatch.syspath_prepend(str(here))
    assert code_version("iniconfig:credit").startswith("sha256:")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("own_credit", "is no import path; write it as package.module:function"),
        ("own_credit:", "is no import path"),
        (":credit", "is no import path"),
        ("own_credit:a.b", "is no import path"),
        ("own_credits:credit", "module 'own_credits' does not load: ModuleNotFoundError"),
        ("own_credit:credits", r"own_credit\.py\) was loaded, but it has no 'credits'"),
        ("own_credit:LIMIT", "'LIMIT' there cannot be called"),
        ("broken:credit", "module 'broken' does not load: ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_loaded_is_refused(here, path, message):
    (here / "broken.py").write_text("1 / 0\n")
    with pytest.raises(NotImportable, match=message):
        load_function(path)
    with pytest.raises(NotImportable, match=message):
        code_version(path)


def test_code_without_a_file_has_no_version():
    assert load_function("builtins:len")("ab") == 2
    with pytest.raises(NotImportable, match="has no file"):
        code_version("builtins:len")


def test_a_file_that_was_edited_since_it_was_loaded_is_refused(here):
    load_function("own_credit:credit")
    (here / "own_credit.py").write_text("def credit(kept, settings):\n    return 'otherwise'\n")
    with pytest.raises(NotImportable, match=r"own_credit\.py was edited since this process loaded it"):
        load_function("own_credit:credit")

"""A hundred configs that cannot work: each is refused with its place and a word that helps, and nothing is started."""

from pathlib import Path

import pytest

from tests.fixtures.wrong_configs import PLUGINS, WrongConfig, write_files, wrong_configs
from tests.flows.conftest import ROOT, Refused

ALL = list(wrong_configs())
ASKING = [
    pytest.param(each, id=str(each), marks=pytest.mark.nightly if number > 3 else ())
    for number, each in enumerate(each for each in ALL if each.asks)
]
"""Each of these loads an environment, and each shows the same way of asking it."""


@pytest.fixture(autouse=True)
def files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the configs name, and the tests' own tasksets."""
    write_files(place)
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", f"{PLUGINS}:{ROOT}")


def check(wrong: WrongConfig, refused: Refused) -> None:
    if not wrong.applies:
        pytest.skip("no mistake on this machine")
    said = refused(*wrong.argv)
    assert wrong.place in said and wrong.says in said, said


@pytest.mark.parametrize("wrong", [each for each in ALL if not each.asks], ids=str)
def test_a_wrong_config_is_refused(wrong: WrongConfig, refused: Refused) -> None:
    check(wrong, refused)


@pytest.mark.engine
@pytest.mark.parametrize("wrong", ASKING)
def test_a_config_that_its_environment_contradicts_is_refused(wrong: WrongConfig, refused: Refused) -> None:
    check(wrong, refused)


def test_there_are_a_hundred_of_all_kinds() -> None:
    assert len({each.argv for each in ALL}) == len(ALL) >= 100
    assert len({each.section for each in ALL}) >= 10 and sum(each.asks for each in ALL) >= 10

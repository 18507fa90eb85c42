"""A hundred configs that cannot work: each is refused with its place and a word that helps, and nothing is started."""

import socket
import sys

import pytest

from flows import cli
from flows.runtime.resolve_run import resolve_run
from tests.fixtures.wrong_configs import PLUGINS, write_files, wrong_configs
from tests.flows.conftest import ROOT

ALL = list(wrong_configs())
ASKING = [
    pytest.param(each, id=str(each), marks=pytest.mark.nightly if number > 3 else ())
    for number, each in enumerate(each for each in ALL if each.asks)
]
"""Each of these loads an environment, and each shows the same way of asking it."""


@pytest.fixture(autouse=True)
def files(place, monkeypatch):
    """The files that the configs name, the directory `model` among them, and the tests' own tasksets."""
    write_files(place)
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", f"{PLUGINS}:{ROOT}")


def check(wrong, refused):
    if not wrong.applies:
        pytest.skip("no mistake on this machine")
    said = refused(*wrong.argv)
    assert wrong.place in said and wrong.says in said, said


@pytest.mark.fault("input", "a config that cannot work", "one message with what is wrong; nothing started")
@pytest.mark.parametrize("wrong", [each for each in ALL if not each.asks], ids=str)
def test_a_wrong_config_is_refused(wrong, refused):
    check(wrong, refused)


@pytest.mark.engine
@pytest.mark.parametrize("wrong", ASKING)
def test_a_config_that_its_environment_contradicts_is_refused(wrong, refused):
    check(wrong, refused)


def test_there_are_a_hundred_of_all_kinds():
    assert len({each.argv for each in ALL}) == len(ALL) >= 100
    assert len({each.section for each in ALL}) >= 10 and sum(each.asks for each in ALL) >= 10


@pytest.mark.engine
def test_the_guard_sees_a_service_that_is_started(started, monkeypatch):
    """With good input the same command does start something: the other tests are not vacuous."""
    monkeypatch.delitem(sys.modules, "prefect", raising=False)  # other tests of this process have imported it
    with pytest.raises(AssertionError, match="was started"):
        cli.main(["run", "demo", "model.path=model"])
    assert started


def test_names_and_stores_are_text_whatever_they_look_like():
    config = resolve_run("train", ["demo"], ["model.path=model"], name="2024", store="true", seed=3)
    assert (config.name, config.store, config.seed) == ("2024", "true", 3)


@pytest.fixture
def closed_port():
    """A port of this machine at which no process listens, and that no other process can take during the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield int(probe.getsockname()[1])


@pytest.mark.fault("services", "a server of others does not answer", "one message; nothing started")
@pytest.mark.engine
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("engine.url=http://127.0.0.1:PORT engine.startup_seconds=0.2", "is not ready after 0.2 s"),
        ("environments.0.address=tcp://127.0.0.1:PORT", "service 'environment reverse_text' at"),
        ("", "no Prefect API answers at http://127.0.0.1:PORT/api"),
    ],
    ids=["engine", "environment server", "Prefect"],
)
def test_a_server_of_others_that_does_not_answer(refused, closed_port, monkeypatch, settings, words):
    monkeypatch.setattr("flows.services.base.EXTERNAL_SECONDS", 0.2)
    if not settings:
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{closed_port}/api")
    message = refused("run", "demo", "model.path=model", *settings.replace("PORT", str(closed_port)).split())
    assert words.replace("PORT", str(closed_port)) in message and str(closed_port) in message

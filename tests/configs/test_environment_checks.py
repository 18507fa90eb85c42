"""What is refused of environments and their seats: each fault planted alone, and found alone."""

import re

import pytest

from configs.errors import ConfigError
from configs.load import load

SEAT = "environments.0.seats.rival"
LABELS = "sandbox_labels=['run-7']"
FROZEN = "seats={rival={model={path='a'}}}"
OF_OTHERS = "address='tcp://127.0.0.1:9'"
FAULTS = [
    ("env={id=3}", "environments.0.env.id: 3 is no name"),
    ("env={taskset={id='other'}}", "environments.0.env.taskset: the taskset has a section of its own"),
    ("seats={rival={temperature=0.0}}", f"{SEAT}.temperature: training needs a temperature above 0"),
    ("seats={rival={model={}}}", f"{SEAT}.model: give the path of its weights, or the url"),
    ("seats={rival={model={path='a', url='http://b'}}}", f"{SEAT}.model: give the path .* both are set"),
    ("evaluation_seat='judge'", "environments.0.evaluation_seat: the judge is left out by drop_judge"),
    (LABELS, "environments.0.sandbox_labels: nothing here runs in a sandbox that takes labels"),
    (FROZEN, OF_OTHERS, f"{SEAT}.model: the environment server at tcp://127.0.0.1:9 is someone else's"),
    (FROZEN, "evaluation_seat='rival'", "environments.0.evaluation_seat: 'rival' is played by a frozen model"),
    (
        *("seats={rival={trainable=false}}", "evaluation_seat='rival'"),
        "environments.0.evaluation_seat: 'rival' has trainable = false",
    ),
]
FINE = [
    ("seats={rival={temperature=0.0, trainable=false}}",),
    ("seats={rival={temperature=0.0, model={path='a'}}}",),
    ("seats={rival={model={url='http://b'}, max_turns=2}}",),
    ("env={id='best-of-n', n=3}",),
    ("evaluation_seat='rival'",),
    (OF_OTHERS,),
    ("pool={type='elastic', max_workers=4}",),
    ("evaluation_seat='judge'", "drop_judge=false"),  # a judge that is trained
]


def found(*settings):
    try:
        load(("demo",), [f"environments.0.{each}" for each in settings])
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[-1])
def test_each_fault_is_found_and_nothing_else(fault):
    *settings, said = fault
    (line,) = found(*settings)
    assert re.match(said, line), line


@pytest.mark.parametrize("settings", FINE, ids=str)
def test_what_can_work_is_let_through(settings):
    assert found(*settings) == []


def test_a_replay_that_samples_is_held_to_the_same():
    for begin, count in (("rollout", 1), ("filtering", 0)):
        base = load(("demo",), ["seed=7"]).model_dump(mode="json")
        base |= {"kind": "replay", "replay": {"run": "base", "from_stage": begin}}
        base["environments"][0]["seats"] = {"rival": {"model": {}}}
        try:
            load((), (), base=base)
            lines = []
        except ConfigError as error:
            lines = error.problems
        assert [each.startswith(f"{SEAT}.model: give the path") for each in lines] == [True] * count, lines


def test_an_evaluation_may_play_a_seat_at_temperature_zero():
    seat = "environments.0.seats={rival={temperature=0.0}}"
    assert load(("demo",), ["kind=evaluate", seat]).environments[0].seats["rival"].temperature == 0


@pytest.mark.parametrize(
    "setting", ["pool={num_workers=2, type='static'}", "hang_seconds=3.0", "startup_seconds=3.0", "max_restarts=0"]
)
def test_what_is_said_about_a_server_is_refused_for_one_of_others(setting):
    assert found(setting) == []
    (line,) = found(setting, OF_OTHERS)
    name = setting.partition("=")[0]
    assert line.startswith(f"environments.0.{name}: the environment server at tcp://127.0.0.1:9 is someone else's")


@pytest.mark.parametrize(
    "place",
    [
        "runtime={type='prime'}",
        "seats={rival={runtime={type='prime'}}}",
        "taskset={id='sample_lookup', task={tools=[{runtime={type='prime'}}]}}",
    ],
)
def test_labels_are_let_through_wherever_a_sandbox_takes_them(place):
    assert found(LABELS, place) == []
    assert len(found(LABELS, place.replace("prime", "docker"))) == 1

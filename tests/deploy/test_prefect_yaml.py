"""The deployments name flows that exist, with parameters that these take."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.runtime.prepare import DEFAULT_FILES

FILE = Path(__file__).parents[2] / "deploy" / "prefect.yaml"
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["deployments"]


def test_every_flow_has_a_deployment() -> None:
    assert [each["name"] for each in DEPLOYMENTS] == ["demo", "train", "sft", "evaluate", "replay", "maintain"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["name"])
def test_entry_point_and_parameters(deployment: dict[str, Any]) -> None:
    module, _, name = deployment["entrypoint"].partition(":")
    flow = getattr(import_module(module), name)
    assert flow.name == name
    assert deployment["name"] in (name, "demo")
    taken = inspect.signature(flow.fn).parameters
    assert deployment["parameters"].keys() <= taken.keys()
    assert "store" in taken  # `stagecoach deploy` gives every deployment one
    assert deployment["parameters"].get("presets", []) == DEFAULT_FILES.get(name, [])
    assert deployment["work_pool"]["name"] == "stagecoach"
    assert {"stagecoach", name} <= set(deployment["tags"])


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["name"])
def test_every_parameter_says_in_the_form_what_it_is(deployment: dict[str, Any]) -> None:
    module, _, name = deployment["entrypoint"].partition(":")
    properties = getattr(import_module(module), name).parameters.properties
    assert [name for name, described in properties.items() if not described.get("description")] == []
    assert {described["position"] for described in properties.values()} == set(range(len(properties)))


def test_nights_are_for_evaluation_and_maintenance_and_training_is_ready() -> None:
    active = {each["name"]: [schedule["active"] for schedule in each.get("schedules", [])] for each in DEPLOYMENTS}
    assert {name: states for name, states in active.items() if states} == {
        "train": [False],
        "evaluate": [True],
        "maintain": [True],
    }
    slugs = {schedule["slug"] for each in DEPLOYMENTS for schedule in each.get("schedules", [])}
    assert slugs == {"nightly"}

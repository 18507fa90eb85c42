"""The deployments name flows that exist, with parameters that these take."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.prepare import DEFAULT_FILES

FILE = Path(__file__).parents[2] / "deploy" / "prefect.yaml"
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["deployments"]


def test_every_flow_has_a_deployment() -> None:
    assert [each["name"] for each in DEPLOYMENTS] == ["train", "sft", "evaluate"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["name"])
def test_entry_point_and_parameters(deployment: dict[str, Any]) -> None:
    module, _, name = deployment["entrypoint"].partition(":")
    flow = getattr(import_module(module), name)
    assert flow.name == deployment["name"] == name
    taken = inspect.signature(flow.fn).parameters
    assert deployment["parameters"].keys() == taken.keys()
    empty = {key: value for key, value in deployment["parameters"].items() if key not in ("files", "overrides")}
    assert empty == {key: taken[key].default for key in empty}
    assert deployment["parameters"]["files"] == DEFAULT_FILES[name]
    assert deployment["work_pool"]["name"] == "stagecoach"
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}

"""Keys of older stores: what the sections of a stage say today is what they said when those were made."""

import pytest

from configs.environments import EnvironmentConfig
from configs.load import load
from configs.run import RunConfig, View
from storage.keys import content_key
from tasks.advantage import stage as advantage
from tasks.assignment import examples
from tasks.assignment import stage as assignment
from tasks.filtering import stage as filtering
from tasks.packing import stage as packing
from tasks.rollout import demonstration
from tasks.rollout import stage as rollout
from tasks.training import stage as training

RECORDED = {
    "demo": {
        examples: "593917ec833c",
        assignment: "7df7ab708561",
        rollout: "b2679189c93d",
        filtering: "dc90f1a546bf",
        advantage: "563269c38136",
        packing: "b58a3b3dddc0",
        training: "ac1b34b72947",
    },
    "sft_demo": {demonstration: "40af5af7a933", filtering: "ece8a13182ed", advantage: "bcbcd5ebdb38"},
}
SETTINGS = {"demo": ["seed=7", "model.path=/x"], "sft_demo": ["seed=7", "model.path=/x", "data.path=/y"]}


@pytest.mark.parametrize("preset", RECORDED)
def test_a_field_that_was_added_and_is_off_changes_no_key(preset: str) -> None:
    config = load([preset], SETTINGS[preset])
    found = {module: content_key(_content(config, module))[:12] for module in RECORDED[preset]}
    assert found == RECORDED[preset]


def _content(config: RunConfig, module) -> dict[str, object]:
    return View(config, module.STAGE.sections, module.STAGE.name).content()


def test_an_environments_algorithm_reaches_advantage_and_nothing_before_it() -> None:
    config = load(["demo"], SETTINGS["demo"])
    own = load(["demo"], [*SETTINGS["demo"], 'environments.0.algorithm={type="rloo"}'])
    assert isinstance(own.environments[0], EnvironmentConfig)
    changed = {module for module in RECORDED["demo"] if _content(config, module) != _content(own, module)}
    assert changed == {advantage}
    assert _content(own, advantage)["algorithms"] == {"reverse_text": {"type": "rloo"}}

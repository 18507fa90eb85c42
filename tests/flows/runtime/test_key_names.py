"""Which settings are in the keys of which stages."""

from configs.environments import EnvironmentConfig
from configs.load import load
from configs.run import RunConfig, View
from tasks.advantage import stage as advantage
from tasks.assignment import examples
from tasks.assignment import stage as assignment
from tasks.filtering import stage as filtering
from tasks.packing import stage as packing
from tasks.rollout import stage as rollout
from tasks.training import stage as training

MODULES = (examples, assignment, rollout, filtering, advantage, packing, training)
SETTINGS = {"demo": ["seed=7", "model.path=/x"], "sft_demo": ["seed=7", "model.path=/x", "data.path=/y"]}


def _content(config: RunConfig, module) -> dict[str, object]:
    return View(config, module.STAGE.sections, module.STAGE.name).content()


def test_an_environments_algorithm_reaches_advantage_and_nothing_before_it() -> None:
    config = load(["demo"], SETTINGS["demo"])
    own = load(["demo"], [*SETTINGS["demo"], 'environments.0.algorithm={type="rloo"}'])
    assert isinstance(own.environments[0], EnvironmentConfig)
    changed = {module for module in MODULES if _content(config, module) != _content(own, module)}
    assert changed == {advantage}
    assert _content(own, advantage)["algorithms"]["reverse_text"]["type"] == "rloo"

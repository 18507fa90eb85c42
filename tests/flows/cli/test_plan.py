"""The plan that `stagecoach check` prints: stages and keys that can be known; and nothing left behind."""

import json
from types import SimpleNamespace

import pytest

from configs.errors import ConfigError
from configs.layers import presets
from configs.load import from_json, load
from flows import cli
from flows.cli import plan
from flows.cli.check import check
from flows.reporting.formats import size
from flows.runtime import machine_facts
from flows.services.gpus import parse_gpu
from tasks.inference.environments.introspection import EnvironmentFacts
from tasks.inference.environments.servers import LoadedEnvironment
from tests.fixtures import builders
from tests.fixtures.commands import cases


@pytest.fixture
def model(tmp_path):
    """A directory that looks like a model from afar."""
    return builders.model(tmp_path / "model", max_positions=512)


def keys(call, *arguments):
    """Return the keys that `check` prints, by stage."""
    _, header, table = call("check", *arguments)[1].partition("key of step 0  sections\n")
    assert header
    return {line.split()[0]: line.split()[1] for line in table.splitlines() if line[:22].strip().isidentifier()}


def test_servers_of_an_environment_are_named(model, call):
    for settings, servers in (
        ("environments.0.servers=3", "reverse_text, reverse_text-2, reverse_text-3"),
        ("environments.0.address=tcp://a:1, tcp://b:2", "tcp://a:1, tcp://b:2"),
    ):
        assert f"\nservers      {servers}\n" in call("check", "demo", f"model.path={model}", settings)[1]


STAGES = ["assignment", "rollout", "filtering", "advantage", "packing", "training", "metrics"]


def test_another_advantage_setting_changes_the_keys_from_there_on(model, call):
    def changed(before, after):
        return [stage for stage in before if before[stage] != after[stage]]

    config = ["demo", f"model.path={model}"]
    before = keys(call, *config, "seed=1")
    assert list(before) == ["policy_import", "examples", *STAGES]
    assert all(len(key) == plan.SHOWN for key in before.values())
    assert changed(before, keys(call, *config, "seed=1", "algorithm.normalise_std=true")) == STAGES[3:]
    assert changed(before, keys(call, *config, "seed=2")) == STAGES
    (model / "model.safetensors").write_bytes(builders.safetensors(b"others"))
    assert changed(before, keys(call, *config, "seed=1")) == ["policy_import", *STAGES[1:]]


@cases(__file__, "unknown_keys")
def test_it_says_why_keys_are_not_known(overrides, reason, call):
    assert reason in call("check", "demo", *overrides)[1]


def test_json_is_the_resolved_config(call):
    config = from_json(call("check", "demo", "--json", "--name", "a", "seed=1")[1])
    assert (config.name, config.seed, config.engine.dtype) == ("a", 1, "float32")
    assert config.training.version


def test_missing_files_are_refused_and_nothing_is_created(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path: there is no directory"):
        check("demo", "model.path=./none")
    assert cli.main(["check", "demo"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_setting_is_explained(call):
    status, said = call("config", "steps", "demo", "steps=3")
    assert status == 0 and said.splitlines()[0] == "steps = 3    (from override steps=3; the default is 20)"
    status, said = call("config", "training", "demo")
    assert status == 0 and "training.loss.type = " in said and "rollout." not in said.split("=")[0]
    (found,) = json.loads(call("config", "training.learning_rate", "--json")[1])
    assert (found["key"], found["value"], found["source"]) == ("training.learning_rate", found["default"], "")
    assert "there is no setting 'lr'; did you mean training.learning_rate?" in call("config", "lr")[1]


@pytest.mark.engine
def test_an_environment_that_is_asked_says_what_it_has(model, call):
    status, said = call("check", "demo", f"model.path={model}", "--load", "evaluation.every=0")
    assert status == 0 and "not checked" not in said
    assert "environment reverse_text loads: " in said and "seats agent; scores" in said
    assert "settings of its taskset: " in said and "num_examples" in said


@cases(__file__, "warnings")
def test_settings_that_are_seldom_meant_are_warned_of(override, warning, model, call):
    status, plain = call("check", "demo", f"model.path={model}")
    assert status == 0 and "warning" not in plain
    status, text = call("check", "demo", f"model.path={model}", override)
    assert status == 0 and f"warning: {warning}" in text


def test_the_room_of_the_memory_directory_is_planned(call, monkeypatch):
    usage = SimpleNamespace(free=20 * 2**30)
    monkeypatch.setattr("flows.cli.plan.shutil.disk_usage", lambda _: usage)
    parameters = 596_049_920  # of Qwen3-0.6B: 24 bytes each for kept state, and 8 times 2 for a policy
    needed = size(40 * parameters)
    _, text = call("check", "qwen3_gpu")
    assert f"/dev/shm: {needed} for policies on their way and kept state, 20 GiB are free" in text
    assert "warning: learner.memory_directory: /dev/shm lacks" in text and "--shm-size" in text
    usage.free *= 2
    assert "lacks" not in call("check", "qwen3_gpu")[1]
    assert size(16 * parameters) in call("check", "qwen3_gpu", "learner.keep_state=false")[1]


def test_more_learner_processes_than_gpus_are_refused(model, call, monkeypatch):
    monkeypatch.setattr(machine_facts, "has_cuda", lambda: True)
    monkeypatch.setattr(machine_facts, "gpus", lambda _: [parse_gpu("H200")])
    status, text = call("check", "demo", f"model.path={model}", "training.device=cuda", "learner.processes=2")
    assert status == 2 and "learner.processes: 2, and this machine has 1 GPU(s)" in text


@pytest.mark.parametrize(
    ("setting", "gpus"), [("engine.quantization=fp8", "engine.gpus"), ("training.fp8=true", "learner.gpus")]
)
def test_8_bits_are_refused_where_no_gpu_has_them(model, call, monkeypatch, setting, gpus):
    monkeypatch.setattr(machine_facts, "has_cuda", lambda: False)
    settings = "engine.dtype=auto", "training.dtype=bfloat16", "training.device=auto"
    demo = "check", "demo", f"model.path={model}", setting, *settings, f"{gpus}=3"
    status, text = call(*demo)
    assert status == 2 and "compute capability 8.9 (Ada, Hopper, Blackwell), and this machine has no such" in text
    assert setting.partition("=")[0] in text
    assert "A100 has less" in call("check", "qwen3_gpu", setting, "--gpu", "A100")[1]
    status, text = call("check", "qwen3_gpu", setting, "training.loss.type=ppo")
    assert status == 0 and "warning: training.loss.type: ppo may clip ratios" in text
    assert "may clip" not in call("check", "qwen3_gpu", setting)[1]
    monkeypatch.setattr(machine_facts, "has_cuda", lambda: True)
    # Of the GPUs that use it alone.
    monkeypatch.setattr(machine_facts, "compute_capability", lambda user: 8.6 if user == "3" else 9.0)
    assert "a GPU of this machine has 8.6" in call(*demo)[1]
    assert "compute capability" not in call(*demo[:-1])[1]


def test_adapters_of_maps_that_the_model_has_not_are_refused(model, call):
    entry = {"dtype": "U8", "shape": [1, 1], "data_offsets": [0, 1]}
    header = json.dumps({"model.layers.0.self_attn.q_proj.weight": entry}).encode()
    demo = "check", "demo", f"model.path={model}"
    assert call(*demo, 'training.lora.target_modules=["q_prj"]')[0] == 0, "no names are known"
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1")
    status, text = call(*demo, 'training.lora.target_modules=["q_proj", "q_prj"]')
    assert status == 2 and "no linear map 'q_prj'; it has q_proj; did you mean q_proj?" in text
    for fine in ('["q_proj"]', "all-linear"):
        assert call(*demo, f"training.lora.target_modules={fine}")[0] == 0


def test_products_in_8_bits_are_for_no_processor(model, call, monkeypatch):
    monkeypatch.setattr(machine_facts, "has_cuda", lambda: True)
    monkeypatch.setattr(machine_facts, "compute_capability", lambda _: 9.0)
    settings = "training.device=cpu", "training.dtype=bfloat16", "training.fp8=true"
    status, text = call("check", "demo", f"model.path={model}", *settings)
    assert status == 2 and "training.fp8: true needs an NVIDIA GPU" in text and "trains on the processor" in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["learner.attention=fa3"], "learner.attention: 'fa3' is for CUDA, and the learner trains on the processor"),
        (["learner.attention=fa3", "training.device=cuda"], "'fa3' needs the module flash_attn_interface"),
    ],
)
def test_a_version_of_attention_that_cannot_be_had_is_refused_before_a_start(model, call, monkeypatch, settings, said):
    monkeypatch.setattr(machine_facts, "has_cuda", lambda: True)
    monkeypatch.setattr(machine_facts, "gpus", lambda _: [])
    status, text = call("check", "demo", f"model.path={model}", *settings)
    assert status == 2 and said in text


FOR_GPUS = [name for name in presets() if load([name]).training.device == "cuda"]


@pytest.mark.parametrize("preset", FOR_GPUS)
def test_a_preset_for_a_gpu_is_planned_where_none_is_here_and_a_run_is_refused(preset, call, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gpu = load([preset]).placement.gpu
    status, text = call("check", preset)
    assert status == 0 and f"no NVIDIA GPU is here, where a run is refused: planned for {gpu}" in text
    assert ("memory of " + gpu in text) == (preset != "qwen3_vl_gpu"), "a model that sees has no plan"
    assert call("check", preset, "placement.gpu=T4")[0] == 2
    status, text = call("check", preset, "placement.gpu=")
    assert status == 2 and "no NVIDIA device" in text
    status, text = call("run", preset)
    assert status == 2 and "no NVIDIA device" in text


@pytest.mark.parametrize(
    ("devices", "smi", "visible", "has_cuda"),
    [
        (["/dev/nvidiactl"], False, None, True),
        (["/dev/nvidiactl"], True, "", False),
        (["/dev/dxg"], True, None, True),  # WSL2
        (["/dev/dxg"], False, None, False),  # WSL2 with a GPU of another vendor
        ([], True, None, False),
    ],
)
def test_a_gpu_is_known_by_its_device(devices, smi, visible, has_cuda, monkeypatch):
    monkeypatch.setattr(machine_facts, "Path", lambda path: SimpleNamespace(exists=lambda: path in devices))
    monkeypatch.setattr(machine_facts.shutil, "which", lambda name: name if smi else None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine_facts.has_cuda() == has_cuda


@pytest.mark.parametrize("groups", [10, 25])
def test_more_groups_than_examples_are_warned_of(groups, call, monkeypatch):
    examples = builders.table("examples", [builders.example(str(number), "reverse_text") for number in range(10)])
    loaded = LoadedEnvironment(examples, EnvironmentFacts({"agent": True}, scores=True))
    monkeypatch.setattr(plan, "load_all", lambda _: [loaded])
    settings = (f"assignment.groups_per_step={groups}", "evaluation.every=0")
    status, text = call("check", "demo", "--load", *settings)
    assert status == 0 and ("25 groups, and there are 10 examples to train on" in text) == (groups > 10)


def test_check_shows_the_first_prompts_of_each_environment(call, monkeypatch):
    chat = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "No"},
    ]
    tasks = [{"prompt": chat}, {"prompt": "3+3?", "system_prompt": "Be short"}, {"prompt": "0"}, {"prompt": "left out"}]
    rows = [builders.example(str(task), "reverse_text") | {"task": json.dumps(task)} for task in tasks]
    loaded = LoadedEnvironment(builders.table("examples", rows), EnvironmentFacts({"agent": True}, scores=True))
    monkeypatch.setattr(plan, "load_all", lambda _: [loaded])
    status, text = call("check", "demo", "--show-prompt", "model.path=demo", "evaluation.every=0")
    written = " ".join(text.replace("<|im_end|>", "").split())
    assert (
        status == 0
        and "<|im_start|>user 2+2? <|im_start|>assistant <think> </think> 5 <|im_start|>user No <|im_start|>" in written
    )
    assert "<|im_start|>system Be short <|im_start|>user 3+3? <|im_start|>assistant" in written
    assert text.count("prompt of ") == 3


@cases(__file__, "scoring")
def test_a_scoring_function_that_does_not_exist_is_refused(scoring, problem, model, call, monkeypatch):
    project = model.parent / "project"
    assert cli.main(["init", str(project)]) == 0
    monkeypatch.chdir(project)
    settings = [f"model.path={model}", f'environments.0.taskset.task={{scoring="{scoring}"}}']
    status, refusal = call("check", "config.toml", *settings)
    assert status == 2 and problem in refusal


@pytest.mark.parametrize(
    ("quantised", "method"),
    [({"quant_method": "awq"}, "awq"), ({"quant_method": "fp8"}, "fp8"), ({"quant_method": "mxfp4"}, "")],
)
def test_quantised_weights_that_cannot_be_trained_are_refused(quantised, method, model, call):
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": quantised}
    (model / "config.json").write_text(json.dumps(config))
    status, said = call("check", "demo", f"model.path={model}")
    assert bool(status) == bool(method) and (f"are quantised by {method}. Only those in mxfp4" in said) == bool(method)

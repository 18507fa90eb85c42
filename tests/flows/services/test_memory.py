"""The plan of a GPU's memory for a whole run, without a GPU."""

import json
import math

import pytest

from configs.errors import ConfigError
from configs.load import load
from flows.services import memory
from flows.services.gpus import compute_capability, parse_gpu
from flows.services.memory import memory_plan, model_shape, plan_here, require_memory
from tasks.inference.engine.weights_view import read_header
from tests.fixtures.family_models import ROUTED, tiny_family

GIB = memory.GIB
MIDDLE, SHORT_ROWS = "model.path=Qwen/Qwen3-4B", "packing.tokens_per_row=16384"


def plan_of(*overrides, gpu="H200", preset="qwen3_gpu"):
    return memory_plan(load([preset], list(overrides)), parse_gpu(gpu))


def test_activations_are_computed_again_where_they_do_not_fit():
    long_rows = MIDDLE, "packing.tokens_per_row=32768"
    plan = plan_of(*long_rows)
    assert plan.fits and plan.recompute is True
    assert not plan_of(*long_rows, "training.gradient_checkpointing=false").fits


def test_what_cannot_fit_is_refused_with_what_could():
    plan = plan_of("model.path=Qwen/Qwen3-8B")
    with pytest.raises(ConfigError, match=r"training lacks .*\(training\.lora\.rank=16\)"):
        require_memory(plan)
    assert any(line.startswith("  training: ") and line.endswith(" GiB TOO MUCH") for line in plan.lines())
    adapters = plan_of("model.path=Qwen/Qwen3-8B", "training.lora.rank=16")
    assert require_memory(adapters).learner.parts["optimizer"] < GIB
    with pytest.raises(ConfigError, match=r"does not fit into 11\.4 GiB of 12\.0 GiB"):
        require_memory(plan_of(gpu="12GiB"))


def test_gpus_of_their_own():
    plan = plan_of(MIDDLE, "engine.gpus=0", "learner.gpus=1", gpu="80GiB")
    assert not plan.shared and not plan.sleeps and set(plan.phases) == {"training", "sampling, on another GPU"}
    assert plan.engine.total <= plan.gpu.total


def test_a_sleep_that_was_asked_for_is_planned():
    assert plan_of("engine.sleep=true").sleeps
    assert not plan_of("engine.sleep=false", MIDDLE, SHORT_ROWS).sleeps


@pytest.mark.parametrize(
    ("preset", "gpu", "sleeps", "recompute", "chunk"),
    [
        ("qwen3_gpu", "L4", False, True, None),
        ("qwen3_gpu", "A100-40GB", True, False, None),
        ("qwen3_gpu", "H200", False, False, 4096),
        ("qwen3_4b_gpu", "H100", True, True, None),
        ("qwen3_4b_gpu", "H200", True, False, 4096),
        ("qwen3_8b_node", "H100", False, "selective", 4096),
        ("qwen3_8b_node", "H200", False, False, 4096),
        ("qwen3_30b_a3b_node", "H100", True, True, 4096),
        ("qwen3_30b_a3b_node", "H200", False, "selective", 4096),
        ("qwen35_4b_gpu", "H200", True, True, 4096),
        ("gpt_oss_20b_gpu", "H200", True, True, 4096),
    ],
)
def test_each_preset_fits_on_the_gpus_that_it_is_for(preset, gpu, sleeps, recompute, chunk):
    plan = require_memory(plan_of(gpu=gpu, preset=preset))
    assert plan.sleeps == sleeps
    assert plan.settings == {"gradient_checkpointing": recompute, "logprob_chunk": chunk}
    assert plan.shared == (preset != "qwen3_8b_node")
    assert max(plan.phases.values()) <= 0.95 * plan.gpu.total
    # The output head is not copied to float32.
    parallel = memory.tensor_parallel(load([preset]).engine.extra_arguments)
    assert plan.engine.parts["weights"] == 2 * model_shape(load([preset]).model.path).parameters // parallel


def test_experts_count_by_all_and_by_those_of_a_token(tmp_path):
    shape = model_shape("Qwen/Qwen3-30B-A3B")
    assert (round(shape.parameters / 1e9, 1), round(shape.active_parameters / 1e9, 1)) == (30.5, 3.4)
    plan = plan_of(gpu="H200", preset="qwen3_30b_a3b_node")
    assert "  parameters: 30.5 billion, of which a token uses 3.4 billion" in "\n".join(plan.lines())
    assert plan.learner.parts["weights"] == 4 * shape.parameters // 8
    dealt = plan_of("learner.expert_parallel=8", preset="qwen3_30b_a3b_node")
    assert "experts are sharded by FSDP2 and dealt to 8 processes" in "\n".join(dealt.lines())
    saved = plan.learner.parts["gathered"] - dealt.learner.parts["gathered"]
    assert saved == 7 * 2 * shape.expert_parameters // 8 // 48, "seven eighths of the experts of a layer"
    quantised = plan_of("engine.quantization=fp8", preset="qwen3_30b_a3b_node").engine.parts["weights"]
    assert quantised == pytest.approx(plan.engine.parts["weights"], rel=0.05), "experts stay in half precision"
    kept = plan_of("learner={keep_state=true, memory_directory='/tmp'}", preset="qwen3_30b_a3b_node").learner
    assert kept.pinned > 3 * 4 * shape.parameters // 8, "weights and moments of all experts"
    for family in {*ROUTED, "gpt_oss"} - {"glm4_moe"}:  # whose first layer has no experts, and counts as the others
        directory = tiny_family(tmp_path / family, family)
        sizes = [entry["shape"] for entry in read_header(directory / "model.safetensors")[0].values()]
        stored, counted = sum(map(math.prod, sizes)), model_shape(str(directory)).parameters
        assert counted == pytest.approx(stored, rel=0.1), family


def test_layers_of_deltanet_have_states_and_no_kv_cache():
    shape = model_shape("Qwen/Qwen3.5-4B")
    # 4.2 billion and a tower of 0.33; all layers count as the larger ones, of DeltaNet.
    assert round(shape.parameters / 1e9, 1) == 4.6 and shape.linear_layers == 24
    assert shape.state_bytes == 24 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
    assert memory.kv_token_bytes(shape, 1) == 4 * 8 * 4 * 256, "of the eight layers of attention"
    few, many = (plan_of(f"rollout.max_in_flight={number}", preset="qwen35_4b_gpu").engine for number in (1, 256))
    logits = 16 * 255 * shape.vocab_size
    assert many.parts["working"] - few.parts["working"] == 255 * shape.state_bytes + logits
    plain = plan_of("training.gradient_checkpointing=false", preset="qwen35_4b_gpu").learner
    assert plain.parts["activations"] > 32 * 8192 * memory.DELTA_BYTES * 4096


def test_longer_rows_are_advised_where_nothing_else_changes():
    for gpu, advised in (("H200", True), ("A100-40GB", False)):
        text = "\n".join(plan_of("packing.tokens_per_row=8192", gpu=gpu).lines())
        assert ("packing.tokens_per_row=16384" in text) == advised
    assert not plan_of().longer_rows


def test_large_chunks_of_logits_are_planned():
    small, large = (plan_of(f"training.logprob_chunk={chunk}").learner.parts["logits"] for chunk in ("1024", "auto"))
    assert large - small == 10 * 3072 * model_shape("Qwen/Qwen3-0.6B").vocab_size


def test_logits_of_prompts_that_are_scored_beside_rollouts_are_planned():
    few, many = (plan_of(f"rollout.max_in_flight={number}").engine.parts["working"] for number in (1, 256))
    vocabulary = model_shape("Qwen/Qwen3-0.6B").vocab_size
    assert many - few == 16 * 255 * vocabulary
    assert few > 4 * (4 + 2 * 1024) * vocabulary


def test_several_gpus_divide_the_engine():
    few = "rollout.max_in_flight=64"
    one, two = (plan_of(few, f"engine.extra_arguments={text}") for text in ("[]", '["--tensor-parallel-size", "2"]'))
    for part in ("weights", "kv cache"):
        assert two.engine.parts[part] == one.engine.parts[part] // 2


def test_engines_that_share_a_gpu_divide_its_kv_cache():
    one, two = (plan_of("engine.gpus=0", f"engine.replicas={number}") for number in (1, 2))
    assert (two.engines, two.sequences) == (2, 128) and "2 engines on a GPU" in "\n".join(two.lines())
    weights, kv = (part.engine.parts["kv cache"] for part in (one, two))
    assert two.engine.parts["weights"] == one.engine.parts["weights"] and kv < weights / 2
    assert max(two.phases.values()) <= two.gpu.usable
    assert two.phases["sampling"] == two.learner.idle + 2 * two.engine.total
    config = load(["qwen3_8b_node"], ["engine.gpus=4,5", "engine.replicas=4"])
    assert [config.engine.replica(number).gpus for number in range(4)] == ["4", "4", "5", "5"]


def test_layers_in_8_bits_leave_more_to_the_kv_cache():
    shape = model_shape("Qwen/Qwen3-0.6B")
    plain, quantised = (plan_of(*setting).engine for setting in ((), ("engine.quantization=fp8",)))
    layers = shape.num_hidden_layers * shape.layer_parameters
    assert plain.parts["weights"] - quantised.parts["weights"] == layers


def test_the_engine_is_told_the_plan():
    plan = plan_of("engine.sleep=true")
    arguments = plan.engine_arguments
    assert arguments[:2] == ["--kv-cache-memory-bytes", str(plan.engine.parts["kv cache"])]
    assert float(arguments[3]) * plan.gpu.total == pytest.approx(plan.engine.total, rel=0.02)
    assert arguments[-1] == "--enable-sleep-mode"
    assert "--enable-sleep-mode" not in plan_of().engine_arguments


def test_a_gpu_by_name_or_by_memory():
    assert parse_gpu("h100").total == 81_559 * 1024**2 and parse_gpu("rtx 4090").name == "RTX-4090"
    assert parse_gpu("80GiB").total == parse_gpu("80").total == 80 * GIB
    with pytest.raises(ValueError, match="no GPU that is known"):
        parse_gpu("H9000")


def test_products_in_8_bits_and_pinned_memory_are_planned():
    plain, eights = (plan_of(f"training.fp8={chosen}").learner for chosen in ("false", "true"))
    shape = model_shape("Qwen/Qwen3-0.6B")
    widths = shape.intermediate_size + shape.hidden_size
    copies = 16_384 * widths + shape.intermediate_size * shape.hidden_size
    assert 0 <= eights.parts["working"] - plain.parts["working"] <= copies
    # Of kept state weights and two moments in float32, a matrix of 12 MiB in 16, the embedding of 594 in 1,024.
    layer, edge = 2 * 8 + 2 * 4 + 3 * 16, 1024
    kept = 3 * (28 * layer + edge)
    files = 28 * layer // 2 + edge // 2
    assert plain.pinned == (kept + files) * 2**20
    assert plan_of("learner.keep_state=false").learner.pinned == files * 2**20
    assert plan_of("training.lora.rank=4", "learner.keep_state=false").learner.pinned == 0
    assert "pinned while it trains: 10.4 GiB of the machine's memory" in "\n".join(plan_of().lines())


SMI = """#!/bin/sh
for argument; do case $argument in --id=*) ids=${argument#--id=};; *compute_cap*) caps=1;; esac; done
for id in $(echo "${ids-0,1,2}" | tr , ' '); do
[ $caps ] && case $id in 0|GPU-a) echo 9.0; continue;; 1) echo 8.6; continue;; 2) echo 7.5; continue;; esac
case $id in
  0|GPU-a) echo "NVIDIA H200, 143771";;
  1) echo "NVIDIA A10G, 23028";;
  2) echo "NVIDIA T400, 4096";;
  *) echo "No devices were found"; exit 6;;
esac; done
"""


@pytest.mark.parametrize(
    ("visible", "overrides", "name"),
    [
        (None, [], "NVIDIA T400"),
        ("0,1", [], "NVIDIA A10G"),
        ("GPU-a", [], "NVIDIA H200"),
        (None, ["engine.gpus=0", "learner.gpus=1"], "NVIDIA A10G"),
        ("2", ["engine.gpus=0", "learner.gpus=0"], "NVIDIA H200"),
        ("1", ["engine.gpus=0"], "NVIDIA A10G"),
        (None, ["engine.url=http://a", "learner.gpus=0"], "NVIDIA H200"),
        ("MIG-b", [], None),
    ],
)
def test_the_smallest_gpu_that_the_run_sees_is_the_one_that_counts(visible, overrides, name, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = load(["qwen3_gpu"], overrides)
    plan = plan_here(config)
    assert (plan and plan.gpu.name) == name
    capabilities = {"NVIDIA H200": 9.0, "NVIDIA A10G": 8.6, "NVIDIA T400": 7.5, None: None}
    users = [config.learner.gpus] + [config.engine.gpus] * (not config.engine.url)
    assert compute_capability(*users) == capabilities[name]


def test_a_model_of_unknown_widths_has_no_plan():
    assert memory_plan(load(["qwen3_gpu"], ["model.path=somebody/unknown"]), parse_gpu("H200")) is None


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
SHARES = {"num_key_value_heads": 4, "head_dim": 16}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TEXT, TEXT | TIED),
        (TEXT | {"tie_word_embeddings": None}, UNTIED),
        (TEXT | UNTIED, UNTIED),
        (TEXT | {"num_key_value_heads": None, "head_dim": None}, SHARES),
        (TEXT | {"num_experts": 8}, None),
        ({"text_config": TEXT, "vision_config": {"hidden_size": 64}}, None),
        (TEXT | {"vision_config": {"hidden_size": 64}}, None),
    ],
)
def test_the_widths_of_a_model_are_read_from_its_config(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = model_shape(str(tmp_path))
    assert (shape and json.loads(shape.model_dump_json(include=set(expected)))) == expected

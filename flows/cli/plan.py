"""The plan of a run, from its config alone: stages with their keys, memory, and what its environments say."""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from configs.checks.run import layers_with_state, missing_files, model_config
from configs.checks.sampling import reshaping, trained_sampling
from configs.errors import ConfigError
from configs.resolve import resolve
from configs.run import RunConfig, for_environment
from configs.sections import ModelConfig
from flows.orchestration.table_workers import require_package
from flows.reporting.formats import size
from flows.runtime import pipeline
from flows.runtime.alerts import alert_problems
from flows.runtime.demo_sources import DEMO
from flows.runtime.executor import Executor
from flows.runtime.loop import evaluation_configs, train_steps
from flows.runtime.machine_facts import config_versions, has_cuda
from flows.runtime.policy_retention import file_bytes
from flows.runtime.preferences import recorded_pairs, require_tokenizer, with_reference
from flows.runtime.preflight import require_fit, require_gate
from flows.runtime.resolve_run import Source, with_stored_weights
from flows.services.gpus import parse_gpu
from flows.services.memory import MemoryPlan, directory_bytes, memory_plan, plan_here
from flows.services.teachers import asked_teachers, is_here, teacher_facts
from storage.read.frames import existing_store
from tasks.arrays.columns import texts
from tasks.inference.engine.model_info import TOKENIZER_FILES, directory_digest, model_directory
from tasks.inference.environments.packages import EnvironmentUnavailable
from tasks.inference.environments.prompt_limits import limit_prompts, prompt_texts
from tasks.inference.environments.servers import load_all
from tasks.learner.protocol import LONGEST_WINDOW
from tasks.learner.tiny import byte_tokenizer
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.stage import Ref

HASHED_BYTES = 512 * 1024**2
"""Weights above this take longer to hash than a plan may take."""
RESHAPED = (
    "the recorded log-probs are those of the distribution so changed, and the learner's those of all tokens at the "
    "temperature: the ratio of the loss holds the difference (docs/sampling.md, Settings)"
)
HOT = 2.0
"""Temperature above which sampling is seldom meant."""
CLIPS_RATIOS = ("ppo", "gspo", "custom")
"""Losses that do not correct for an engine of another precision: they clip the ratio to it, or are not known."""
NUM_PROMPTS = 3
"""Prompts of an environment that are printed."""
SHOWN = 12
"""Characters of a key that are printed."""


def gpu_elsewhere(config: RunConfig) -> str:
    """Return the GPU that a config is meant for, where it trains on one and none is here; else an empty string."""
    return config.placement.gpu if config.training.device == "cuda" and not has_cuda() else ""


def resolve_here(config: RunConfig, gpu: str = "") -> tuple[RunConfig, MemoryPlan | None]:
    """Return a config as it would run here, or on the GPU that is named, and the plan of its memory if it is known.

    Raises ConfigError for files that are missing, except weights that are not named, and for an unknown GPU.
    """
    if config.kind == "dpo":
        store = existing_store(config.store)
        config = with_reference(with_stored_weights(store, config))
        recorded_pairs(store, config)
    if missing := [line for line in missing_files(config) if config.model.path or not line.startswith("model.path")]:
        raise ConfigError(missing)
    require_gate(config)
    require_package(config.prefect)
    other_gpu = parse_gpu(gpu) if gpu else None
    local = _with_local_model(config)
    teachers = teacher_facts(local, local=True) if local.model.path else {}
    resolved = resolve(config, config_versions(local, other_gpu) | teachers)
    if config.kind == "dpo":
        require_tokenizer(store, resolved)
    # The widths of some models are known before they are here.
    training = config.training
    settings = {name: getattr(training, name) for name in ("gradient_checkpointing", "logprob_chunk")}
    requested = _with_training(resolved, settings)
    plan = memory_plan(requested, other_gpu) if other_gpu else plan_here(requested)
    return (_with_training(resolved, plan.settings) if plan else resolved), plan


def _with_local_model(config: RunConfig) -> RunConfig:
    """Return a config without a model that would have to be downloaded: a plan fetches nothing."""
    model = config.model if _weights(config) else config.model.model_copy(update={"path": ""})
    return config.model_copy(update={"model": model})


def _with_training(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    return config.model_copy(update={"training": config.training.model_copy(update=settings)})


def _weights(config: RunConfig) -> Path | None:
    directory = Path(config.model.path).expanduser()
    return directory if config.model.path and directory.is_dir() else None


def lines(config: RunConfig, resolved: RunConfig, memory: MemoryPlan | None) -> Iterator[str]:
    """Yield the plan of `resolved`, whose open fields were filled in from `config`."""
    yield f"{resolved.kind} {resolved.name} in {resolved.store}; nothing was started"
    values = {
        "model": resolved.model.path or "missing",
        "renderer": resolved.model.renderer or "not known yet",
        "engine": f"{resolved.engine.version or 'none installed'}, {resolved.engine.dtype}",
        "learner": f"{resolved.training.version}, {resolved.training.dtype} on {resolved.training.device}",
        "proof": _proof(resolved),
        "seed": f"{resolved.seed}" + (" (drawn now; give seed= to keep it)" if config.seed is None else ""),
    }
    yield from (f"{name:<13}{value}" for name, value in values.items() if value)
    for environment in resolved.served_environments.values():
        yield f"environment  {environment.name}: {environment.taskset['id']} {environment.version}".rstrip()
        if len(environment.server_names) > 1:
            yield f"servers      {', '.join(environment.addresses or environment.server_names)}"
    yield from judge_lines(resolved)
    yield from (f"alerts       {alert.receiver}: {', '.join(alert.on)}" for alert in resolved.alerts)
    yield from (f"warning: {problem}" for problem in alert_problems(resolved))
    reason, weights = unknown_keys(config), _weights(config)
    digest = directory_digest(weights.resolve()) if weights and not reason else ""
    yield f"{'stage':<22} {'key of step 0':<{SHOWN}}  sections"
    for task, ref in planned_stages(resolved, Source(resolved.model.path, digest)):
        key = "-" if reason else ref.key[:SHOWN]
        yield f"{task.stage.name:<22} {key:<{SHOWN}}  {', '.join(task.stage.sections) or 'none'}"
    if reason:
        yield f"keys are not known yet: {reason}"
    yield from memory.lines() if memory else ()
    yield from memory_directory(resolved)
    yield from warnings(resolved)


def judge_lines(config: RunConfig) -> Iterator[str]:
    """Yield for each judge who is asked, and how often at most in a step with one trained seat in each rollout."""
    assigned, batches = config.assignment, config.filtering.max_batch_attempts
    groups = math.ceil(assigned.groups_per_step * assigned.oversampling)
    for judge in config.judges:
        questions = groups * assigned.group_size * batches
        held_out = "" if judge.weight else ", held out"
        yield (
            f"judge        {judge.name}{held_out}: {judge.model} at {judge.url}"
            if judge.url
            else f"judge        {judge.name}{held_out}: an engine of {judge.path}"
        )
        yield (
            f"  at most {questions * (1 + judge.rereads):,} answers a step: {questions:,} questions, in {batches} "
            f"batches where nothing is left to train on, each asked {1 + judge.rereads} times where no score is read"
        )


def _proof(config: RunConfig) -> str:
    """Return what the learner proves of the model before it trains; empty where it trains none that is here."""
    model = model_config(config.model.path) if config.computes("training") or config.from_data else {}
    if not model:
        return ""
    stateful, window = layers_with_state(model), model.get("use_sliding_window", True) and model.get("sliding_window")
    by_segment = bool(stateful or model.get("attn_logit_softcapping") or "gpt_oss" in str(model.get("model_type")))
    kernel = config.training.device == "cuda" and config.training.dtype == "bfloat16" and not by_segment
    layers = [f"layers of {stateful}"] * bool(stateful) + [f"a window of {window} tokens"] * bool(window)
    layers += [f"not proven, as it is above {LONGEST_WINDOW}"] * bool(window and window > LONGEST_WINDOW)
    what = ", ".join([*(model.get("architectures") or ["the model"]), *layers])
    return f"{what}: packed as alone, gradients, and engine as learner, when the run begins; attends " + (
        "by torch's kernel" if kernel else "segment by segment"
    )


def memory_directory(config: RunConfig) -> Iterator[str]:
    """Yield how much room `learner.memory_directory` of this machine has beside what the run takes of it."""
    place, needed = config.learner.memory_directory, directory_bytes(config)
    if place and needed and Path(place).is_dir():
        free = shutil.disk_usage(place).free
        yield f"{place}: {size(needed)} for policies on their way and kept state, {size(free)} are free"
        if free < needed:
            yield (
                f"warning: learner.memory_directory: {place} lacks {size(needed - free)}: policies go to the disk "
                "first, and state without room is not kept. A container gets more by docker run --shm-size"
            )


def warnings(config: RunConfig) -> list[str]:
    """Return a line for each setting of a resolved config that works here and is seldom meant."""
    processes, cores = config.learner.processes, len(os.sched_getaffinity(0))
    loss, in_8_bits = config.training.loss.type, bool(config.engine.quantization) or config.training.fp8
    doubts = (
        (
            not (config.model.path or config.external or config.evaluation.policy),
            "model.path is empty: `stagecoach run` needs it; `stagecoach demo` makes a small model",
        ),
        (
            config.kind != "evaluate" and config.training.device == "cpu" and processes > cores,
            f"learner.processes: {processes} processes share {cores} cores and each holds the whole model in memory; "
            "on the processor one is usual",
        ),
        (
            config.kind == "train" and in_8_bits and loss in CLIPS_RATIOS,
            f"training.loss.type: {loss} may clip ratios of learner to engine, which with products in 8 bits differ "
            "before the policy moves; dppo, ipo and cispo correct for that, and training.loss.tis caps the ratio",
        ),
    )
    lines = [text for is_doubtful, text in doubts if is_doubtful]
    return [f"warning: {text}" for text in (*lines, *(_sampling_doubts(config) if config.kind == "train" else ()))]


def _sampling_doubts(config: RunConfig) -> Iterator[str]:
    # What teachers sample has no ratio to the engine's log-probs.
    taught = [for_environment(config.teachers, entry.name) is not None for entry in config.environments]
    settings = trained_sampling(config, [index for index, is_taught in enumerate(taught) if not is_taught])
    for key, value in settings.items():
        if key.endswith(".temperature") and value > HOT:
            yield f"{key}: {value:g}; above {HOT:g} tokens are close to random, and 1 is usual"
    for key, value in reshaping(settings).items():
        yield f"{key}: {value}; {RESHAPED}"


def planned_stages(config: RunConfig, source: Source) -> list[tuple[StageTask, Ref]]:
    """Return the stages of the first step, as the pipeline itself calls them, with the keys they would have."""
    if config.kind == "evaluate":
        first = next(iter(evaluation_configs(config).values()))  # policy and examples are the same for all sets
        execute = Executor(config=first)
        pipeline.evaluate(execute, None if config.external else pipeline.first_policy(execute, source))
        return execute.results
    execute = Executor(config=config)
    next(train_steps(execute, source))
    return [(task, ref) for task, ref in execute.results if ref.step == 0]


def unknown_keys(config: RunConfig) -> str:
    """Return why the keys of a run cannot be known before it starts, or an empty string where they can."""
    if config.seed is None:
        return "no seed is given, so each new run draws its own and samples again"
    weights = _weights(config)
    teachers = [teacher for _, teacher in asked_teachers(config)]
    if config.from_data or weights is None or not all(teacher.version or is_here(teacher) for teacher in teachers):
        return "they depend on weights, which are not here, or on rows, which a plan does not read"
    large = file_bytes(weights) > HASHED_BYTES
    return f"more than {size(HASHED_BYTES)} of weights are not hashed for a plan" if large else ""


def environment_lines(config: RunConfig, show_prompts: bool = False) -> Iterator[str]:
    """Load each environment in a process of its own, and yield what it says of itself and what to mind.

    With `show_prompts` also its first prompts. Raises ConfigError with all that does not load or fit.
    """
    model, config = config.model, _with_local_model(config)
    environments = [*config.served_environments.values()]
    try:
        by_name = {
            # Without a path its tokenizer is missing.
            environment.name: limit_prompts(environment, facts, config.model) if config.model.path else facts
            for environment, facts in zip(environments, load_all(environments), strict=True)
        }
    except EnvironmentUnavailable as error:
        raise ConfigError([str(error)]) from error
    notes, num_examples = require_fit(config, by_name), 0
    for name, environment in by_name.items():
        splits = texts(environment.examples["split"])
        num_examples += splits.count("train")
        yield (
            f"environment {name} loads: {splits.count('train')} examples to train on, {splits.count('eval')} held out; "
            f"seats {', '.join(environment.facts.seats)}; {'scores' if environment.facts.scores else 'no reward'}"
        )
        yield f"  settings of its taskset: {', '.join(environment.facts.settings)}"
        if show_prompts:
            yield from prompt_lines(map(json.loads, texts(environment.examples["task"])), model)
    yield from (f"note: {line}" for line in notes)
    if config.kind == "train" and 0 < num_examples < (groups := config.assignment.groups_per_step):
        yield (
            f"warning: assignment.groups_per_step: {groups} groups, and there are {num_examples} examples to train on: "
            f"each step samples an example about {groups / num_examples:.1f} times"
        )


def prompt_lines(tasks: Iterable[dict[str, Any]], model: ModelConfig) -> Iterator[str]:
    """Yield the prompts of the first tasks as the model will see them, each below the number of its tokens.

    Of a model of the hub the files of its tokenizer are fetched. Raises ConfigError where they are not to be had.
    """
    place = model.tokenizer or model.path
    with TemporaryDirectory() as made:
        if place == DEMO:  # a run makes it, with a tokenizer that writes the same texts in fewer tokens
            byte_tokenizer(512, 2048).save_pretrained(place := made)
        directory = str(model_directory(place, patterns=TOKENIZER_FILES))
        for count, text in prompt_texts(islice(tasks, NUM_PROMPTS), model, directory):
            yield f"prompt of {count} tokens:"
            yield from (f"  {line}" for line in text.splitlines())

"""The plan of a run, from its config alone: stages with their keys, sizes, memory, and what its environments say."""

from collections.abc import Iterator
from pathlib import Path

from configs.algorithms import RaeConfig
from configs.checks.run import missing_files
from configs.errors import ConfigError
from configs.resolve import resolve
from configs.run import RunConfig, View
from flows.orchestration.table_workers import require_package
from flows.reporting.formats import size
from flows.runtime import pipeline
from flows.runtime.executor import Executor
from flows.runtime.loop import evaluation_configs, train_steps
from flows.runtime.machine_facts import config_versions, doubtful_settings
from flows.runtime.policy_retention import file_bytes, most_bytes, num_parameters
from flows.runtime.preflight import require_fit, require_gate
from flows.runtime.resolve_run import Source
from flows.services.memory import MemoryPlan, memory_plan, parse_gpu, plan_here
from flows.services.teachers import asked_teachers, is_here, local_teacher_facts
from storage.keys import content_key
from tasks.arrays.columns import texts
from tasks.inference.engine.model_info import directory_digest
from tasks.inference.environments.packages import EnvironmentUnavailable
from tasks.inference.environments.prompt_limits import limit_prompts
from tasks.inference.environments.servers import load_all
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.stage import Ref

HASHED_BYTES = 512 * 1024**2
"""Weights above this take longer to hash than a plan may take."""
BASELINES = {
    "example": "one for each example and agent; where most examples are new, key=agent has a baseline at all",
    "agent": "one for each agent over all examples; where few examples come back often, key=example tells them apart",
}
"""Which data the keys of `rae` fit: how many examples there are is not known before a run."""
SHOWN = 12
"""Characters of a key that are printed."""


def resolve_here(config: RunConfig, gpu: str = "") -> tuple[RunConfig, MemoryPlan | None]:
    """Return a config as it would run here, or on the GPU that is named, and the plan of its memory if it is known.

    Raises ConfigError for files that are missing, except weights that are not named, and for an unknown GPU.
    """
    if missing := [line for line in missing_files(config) if config.model.path or not line.startswith("model.path")]:
        raise ConfigError(missing)
    require_gate(config)
    require_package(config.prefect)
    try:
        other_gpu = parse_gpu(gpu) if gpu else None
    except ValueError as error:
        raise ConfigError([f"--gpu: {error}"]) from error
    local = _with_local_model(config)
    teachers = local_teacher_facts(local) if local.model.path else {}
    resolved = resolve(config, config_versions(local, other_gpu) | teachers)
    # The widths of some models are known before they are here.
    requested = _with_recompute(resolved, config.training.gradient_checkpointing)
    plan = memory_plan(requested, other_gpu) if other_gpu else plan_here(requested)
    return (_with_recompute(resolved, plan.recompute) if plan else resolved), plan


def _with_local_model(config: RunConfig) -> RunConfig:
    """Return a config without a model that would have to be downloaded: a plan fetches nothing."""
    is_local = Path(config.model.path).expanduser().is_dir()
    model = config.model if is_local else config.model.model_copy(update={"path": ""})
    return config.model_copy(update={"model": model})


def _with_recompute(config: RunConfig, value: bool | str) -> RunConfig:
    training = config.training.model_copy(update={"gradient_checkpointing": value})
    return config.model_copy(update={"training": training})


def warnings(config: RunConfig, resolved: RunConfig) -> Iterator[str]:
    """Yield settings that are seldom meant."""
    if not config.model.path and not config.external and not config.evaluation.policy:
        yield "warning: model.path is empty: `stagecoach run` needs it; `stagecoach demo` makes a small model"
    yield from (f"warning: {line}" for line in doubtful_settings(resolved))


def environment_lines(config: RunConfig) -> Iterator[str]:
    """Load each environment in a process of its own, and yield what it says of itself and what to mind.

    Raises ConfigError with all that does not load or fit.
    """
    config = _with_local_model(config)
    environments = config.environments if config.kind != "sft" else ()
    try:
        loaded = load_all(environments)
        if config.model.path:  # else its tokenizer is missing
            loaded = limit_prompts(environments, loaded, config.model)
    except EnvironmentUnavailable as error:
        raise ConfigError([str(error)]) from error
    by_name = {environment.name: facts for environment, facts in zip(environments, loaded, strict=True)}
    notes = require_fit(config, by_name)
    for name, environment in by_name.items():
        splits = texts(environment.examples["split"])
        yield (
            f"environment {name} loads: {splits.count('train')} examples to train on, {splits.count('eval')} held out; "
            f"seats {', '.join(environment.facts.seats)}; {'scores' if environment.facts.scores else 'no reward'}"
        )
        yield f"  settings of its taskset: {', '.join(environment.facts.settings)}"
    yield from (f"note: {line}" for line in notes)


def lines(config: RunConfig, resolved: RunConfig) -> Iterator[str]:
    """Yield the plan of `resolved`, whose open fields were filled in from `config`."""
    yield f"{resolved.kind} {resolved.name} in {resolved.store}; nothing was started"
    yield from _settings(config, resolved)
    yield ""
    reason = unknown_keys(config)
    digest = "" if reason else directory_digest(Path(config.model.path).expanduser().resolve())
    yield f"{'stage':<14} {'settings':<{SHOWN}}  {'key of step 0':<{SHOWN}}  sections"
    for task, ref in planned_stages(resolved, Source(resolved.model.path, digest)):
        settings = content_key(View(resolved, task.stage.sections, task.stage.name).content())[:SHOWN]
        key = "-" if reason else ref.key[:SHOWN]
        yield f"{task.stage.name:<14} {settings}  {key:<{SHOWN}}  {', '.join(task.stage.sections) or 'none'}"
    if reason:
        yield f"keys are not known yet: {reason}"
    yield ""
    yield from sizes(resolved)
    yield from disk(resolved)


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
    # Their digest is part of the first key, and a plan reads no data.
    if config.kind == "sft":
        return "they depend on the rows of the file"
    directory = Path(config.model.path).expanduser()
    if not config.model.path or not directory.is_dir():
        return "they depend on the weights, which are not here"
    if any(not teacher.version and not is_here(teacher) for _, teacher in asked_teachers(config)):
        return "they depend on a teacher that is not here"
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return f"{size / 1024**3:.1f} GiB of weights are not hashed for a plan" if size > HASHED_BYTES else ""


def sizes(config: RunConfig) -> Iterator[str]:
    """Yield what the config comes to in rollouts and tokens."""
    assignment, rollout = config.assignment, config.rollout
    samples = assignment.groups_per_step * assignment.group_size
    if config.kind == "train":
        yield (
            f"{config.steps} steps of {assignment.groups_per_step} groups of {assignment.group_size}: {samples} "
            f"rollouts a step, at most {samples * rollout.max_tokens} tokens sampled a step in single-turn tasks"
        )
    if config.kind == "sft":
        yield f"{config.steps} steps of {samples} samples, each of at most {config.data.max_length} tokens"
    for name, evaluation in config.evaluation.of_sets().items():
        if config.kind == "evaluate" or evaluation.every:
            count = evaluation.num_examples * len(evaluation.environments or config.environments)
            yield f"evaluation{name and f' {name}'}: {count} examples, {count * evaluation.attempts} rollouts"
    if config.kind != "evaluate":
        yield f"rows of {config.packing.tokens_per_row} tokens for {config.packing.data_parallel} learner process(es)"


def disk(config: RunConfig) -> Iterator[str]:
    """Yield how much disk the weights of a run will take at most, where it trains those of a model that is here."""
    directory = Path(config.model.path).expanduser()
    if config.kind in ("train", "sft") and config.model.path and directory.is_dir() and config.training.lora is None:
        most = size(file_bytes(directory) + most_bytes(config, num_parameters(directory)))
        yield f"weights: up to {most} on disk at one time (training.keep_weights = {config.training.keep_weights!r})"


def _settings(config: RunConfig, resolved: RunConfig) -> Iterator[str]:
    yield f"model        {resolved.model.path or 'none given: `stagecoach demo` makes one, others need model.path'}"
    if resolved.model.renderer and not config.model.renderer:
        yield f"renderer     {resolved.model.renderer}, recognised by the model's name, or its type and chat template"
    for environment in resolved.environments:
        yield f"environment  {environment.name}: {environment.taskset['id']} {environment.version}".rstrip()
        if len(environment.server_names) > 1:
            yield f"servers      {', '.join(environment.addresses or environment.server_names)}"
    for where, algorithm in resolved.used_algorithms.items():
        if isinstance(algorithm, RaeConfig):
            yield f"baseline     {where}.key={algorithm.key}: {BASELINES[algorithm.key]}"
    yield f"engine       {resolved.engine.version or 'none installed'}, {resolved.engine.dtype}"
    yield f"learner      {resolved.training.version}, {resolved.training.dtype} on {resolved.training.device}"
    yield f"seed         {resolved.seed}" + (" (drawn now; give seed= to keep it)" if config.seed is None else "")

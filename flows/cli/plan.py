"""The command check: the plan of a run from its config, before anything is opened or started."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from configs.algorithms import RaeConfig
from configs.checks.run import missing_files
from configs.errors import ConfigError
from configs.load import dump
from configs.load import load as load_config
from configs.resolve import resolve
from configs.run import RunConfig, View
from flows.cli.arguments import Items, Name, StoreOption, option, split_items
from flows.orchestration.table_workers import require_package
from flows.reporting.formats import say, size
from flows.runtime import pipeline
from flows.runtime.executor import Executor
from flows.runtime.loop import evaluation_configs
from flows.runtime.machine_facts import config_versions, doubtful_settings
from flows.runtime.policy_retention import file_bytes, most_bytes, num_parameters
from flows.runtime.preflight import require_fit, require_gate
from flows.runtime.resolve_run import Source, assignments
from flows.runtime.rollouts import RolloutSource
from flows.services.memory import Gpu, memory_plan, parse_gpu, plan_here, require_memory
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
NOT_ASKED = (
    "not checked: that each environment imports, its settings, seats, examples and rewards, and how long its prompts "
    "are; `stagecoach check --load` asks it"
)
SHOWN = 12
"""Characters of a key that are printed."""


def check(
    *items: Items,
    name: Name = "",
    store: StoreOption = "",
    load: Annotated[bool, option("load each environment too, and check what it says of itself")] = False,
    gpu: Annotated[
        str, option("plan the memory of this GPU, such as H200 or 80GiB; this machine need not have it")
    ] = "",
    as_json: Annotated[bool, option("print the resolved config as JSON instead", name="--json")] = False,
) -> int:
    """Resolve and validate a config and print the plan. Raises ConfigError if it cannot run here.

    With `load`, each environment is loaded in a separate process.
    """
    files, overrides = split_items(items)
    given = {key: value for key, value in (("name", name), ("store", store)) if value}
    config = load_config(files, [*overrides, *assignments(given)])
    # A plan without a model is useful, so a model that is not named is no mistake here.
    absent = [line for line in missing_files(config) if config.model.path or not line.startswith("model.path")]
    if absent:
        raise ConfigError(absent)
    require_gate(config)
    require_package(config.prefect)
    # A model that would have to be downloaded is not looked at: a plan fetches nothing.
    is_local = Path(config.model.path).expanduser().is_dir()
    here = config if is_local else _without_model(config)
    teachers = local_teacher_facts(here) if here.model.path else {}
    elsewhere = _named_gpu(gpu)
    resolved = resolve(config, config_versions(here, elsewhere) | teachers)
    # The widths of some models are known before they are here.
    asked = _with_recompute(resolved, config.training.gradient_checkpointing)
    plan = memory_plan(asked, elsewhere) if elsewhere else plan_here(asked)
    if plan:
        resolved = _with_recompute(resolved, plan.recompute)
    if as_json:
        print(dump(resolved))
        return 0
    doubts = [f"warning: {line}" for line in (*_without_weights(config), *doubtful_settings(resolved))]
    for line in (*lines(config, resolved), *(plan.lines() if plan else ()), *doubts):
        say(line)
    if plan:
        require_memory(plan)
    print()
    for line in environment_lines(resolved if is_local else _without_model(resolved)) if load else (NOT_ASKED,):
        say(line)
    return 0


def _without_weights(config: RunConfig) -> Iterator[str]:
    if not config.model.path and not config.external and not config.evaluation.policy:
        yield "model.path is empty: `stagecoach run` needs it; `stagecoach demo` makes a small model"


def _with_recompute(config: RunConfig, value: bool | str) -> RunConfig:
    training = config.training.model_copy(update={"gradient_checkpointing": value})
    return config.model_copy(update={"training": training})


def _named_gpu(text: str) -> Gpu | None:
    if not text:
        return None
    try:
        return parse_gpu(text)
    except ValueError as error:
        raise ConfigError([f"--gpu: {error}"]) from error


def _without_model(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": ""})})


def environment_lines(config: RunConfig) -> Iterator[str]:
    """Load each environment in a process of its own, and yield what it says of itself and what to mind.

    Raises ConfigError with all that does not load or fit.
    """
    environments = config.environments if config.kind != "sft" else ()
    try:
        found = load_all(environments)
        if config.model.path:  # else its tokenizer is not here
            found = limit_prompts(environments, found, config.model)
        loaded = dict(zip([each.name for each in environments], found, strict=True))
    except EnvironmentUnavailable as error:
        raise ConfigError([str(error)]) from error
    notes = require_fit(config, loaded)
    for name, own in loaded.items():
        splits = texts(own.examples["split"])
        yield (
            f"environment {name} loads: {splits.count('train')} examples to train on, {splits.count('eval')} held out; "
            f"seats {', '.join(own.facts.seats)}; {'scores' if own.facts.scores else 'no reward'}"
        )
        yield f"  settings of its taskset: {', '.join(own.facts.settings)}"
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
        settings = content_key(section(task, resolved))[:SHOWN]
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
    else:
        execute = Executor(config=config)
        examples, policy = pipeline.import_sources(execute, source)
        rollouts = RolloutSource(execute, examples)
        rollouts.add([0], policy)
        batch = pipeline.build_batch(rollouts, 0, policy)
        trained, _ = pipeline.train(execute, 0, batch, policy)
        pipeline.write_metrics(execute, 0, (*batch.refs, trained))
    return execute.results


def section(task: StageTask, config: RunConfig) -> dict[str, Any]:
    """Return the settings that are part of a stage's key."""
    return View(config, task.stage.sections, task.stage.name).content()


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
    for name, each in config.evaluation.of_sets().items():
        if config.kind == "evaluate" or each.every:
            count = each.num_examples * len(each.environments or config.environments)
            yield f"evaluation{name and f' {name}'}: {count} examples, {count * each.attempts} rollouts"
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

"""What is looked for before a run starts anything: what would make it fail later, after services and minutes."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from configs.algorithms import CustomConfig, ImitationSection
from configs.checks.environments import seat_problems
from configs.environments import EnvironmentConfig
from configs.errors import ConfigError
from configs.run import RunConfig, View
from flows.orchestration.server import probe
from flows.orchestration.settings import required_url
from flows.orchestration.table_workers import require_package
from flows.runtime.alerts import alert_problems
from flows.runtime.loop import evaluation_configs
from flows.runtime.policy_retention import require_space
from flows.runtime.resolve_run import nothing_started
from flows.runtime.session import Session
from flows.services.memory import plan_here, require_memory
from storage.records import REMOVED
from tasks.arrays.columns import texts
from tasks.arrays.seats import JUDGE
from tasks.assignment.examples import FieldMissing
from tasks.assignment.stage import EVALUATION_STAGE, EvaluationInputs, TooFewExamples, evaluation_assignment
from tasks.gate.stage import require_rule
from tasks.inference.engine.model_info import count_tokens, model_directory
from tasks.inference.environments.introspection import EnvironmentFacts
from tasks.inference.environments.servers import LoadedEnvironment
from tasks.inference.sampling.bindings import SeatBindings, require_named
from tasks.runtime.process_variables import needed_by, withheld
from tasks.runtime.stage import Ref

FIRST = 64
"""Prompts of an environment that are counted in tokens."""
CHARACTERS = 16
"""Characters for each token of the context that are counted, as megabytes take minutes: no text so long fits."""
Count = Callable[[Sequence[str]], list[int] | None]
"""Returns the tokens of each text, None where there is no tokenizer that can say."""
Finding = tuple[bool, str]
"""Whether it stops the run, and its text."""


def preflight(session: Session, missing: Sequence[Ref]) -> None:
    """Make sure that the missing work can begin: a gate's rule, room on the disk, services, environments that fit.

    Raises ConfigError, NoSpace, ServiceFailed or EnvironmentUnavailable, and where services are on pools, DeployRefused
    without a Prefect server and PrefectUnreachable where it does not answer; nothing was started then.
    """
    config, stages = session.config, {ref.stage for ref in missing}
    with nothing_started():
        require_gate(config)
        if problems := alert_problems(config):
            raise ConfigError(problems)
        require_package(config.prefect)
        needed = session.needed_services(missing)
        is_local = config.placement.services == "local"  # the GPUs of pools are other machines'
        if needed and is_local and (plan := plan_here(config)):
            require_memory(plan)
        # Tables are small beside weights; without these, only a little room is asked for.
        makes_weights = bool(stages & {"training", "policy_import"})
        require_space(session.context.store, config, Path(session.source.weights) if makes_weights else None)
        if not is_local and any(service.deployment for service in needed):
            probe(required_url("and placement.services is pools"))
        for service in needed:
            service.check_available()
        # Loaded in processes of their own, and kept for the stage; a recorded run was checked when it began.
        last = session.context.store.runs.last(config.name)
        is_checked = last is not None and last.event != REMOVED
        if config.served_environments and ("examples" in stages or ("rollout" in stages and not is_checked)):
            for line in require_fit(config, session.environments.load()):
                session.notify("note", text=line)


def require_fit(config: RunConfig, loaded: Mapping[str, LoadedEnvironment]) -> list[str]:
    """Return what is to be said of a run in its loaded environments; raises ConfigError where it cannot work there."""
    place = config.model.tokenizer or config.model.path

    def count(texts: Sequence[str]) -> list[int] | None:
        return count_tokens(model_directory(place), texts) if place and not config.external else None

    findings = environment_findings(config, loaded, count)
    if problems := [text for stops, text in findings if stops]:
        raise ConfigError(problems)
    return [text for _, text in findings]


def require_gate(config: RunConfig) -> None:
    """Raise ConfigError where the gate's rule is no condition in SQL over the figures of a batch."""
    if config.gate.type == "rule":
        require_rule(config.gate.rule)


def environment_findings(config: RunConfig, loaded: Mapping[str, LoadedEnvironment], count: Count) -> list[Finding]:
    """Return what speaks against a run of `config` in its loaded environments, by name; `count` counts tokens."""
    findings = [(True, problem) for problem in _of_run(config, loaded)]
    for where, environment in config.served_environments.items():
        entry = loaded[environment.name]
        findings += _examples(config, where, environment, entry)
        findings += _rewards(config, where, environment, entry.facts)
        findings += ((True, f"{where}.bindings: {problem}") for problem in _unbound(environment, entry))
        findings += _images_of_several(where, entry)
        findings += _keys(where, environment, entry.facts)
        findings += _long_first_prompts(config.engine.max_model_len, where, entry.examples, count)
    return findings


def _of_run(config: RunConfig, loaded: Mapping[str, LoadedEnvironment]) -> Iterator[str]:
    """Yield the problems of all environments together: seats, and held-out examples of the evaluations that are due."""
    if config.computes("advantage"):
        seats = {entry.name: trained_seats(entry, loaded[entry.name].facts) for entry in config.environments}
        yield from seat_problems(config, seats)
    examples = pa.concat_tables([environment.examples for environment in loaded.values()])
    sets = evaluation_configs(config).values() if config.kind != "replay" else ()
    for where, evaluated in zip(config.evaluation.set_keys, sets, strict=False):
        if config.kind != "evaluate" and not any(map(evaluated.evaluation.due, range(config.steps + 1))):
            continue
        try:
            view = View(evaluated, EVALUATION_STAGE.sections, EVALUATION_STAGE.name)
            evaluation_assignment(EvaluationInputs(examples), view)
        except (TooFewExamples, FieldMissing) as error:
            yield f"{where}: {error}"


def trained_seats(environment: EnvironmentConfig, facts: EnvironmentFacts) -> list[str]:
    """Return the seats that are trained: those that environment and config let be, which the policy plays."""
    seats = environment.seats
    return [
        name
        for name, trainable in facts.seats.items()
        if trainable
        and (name not in seats or (seats[name].trainable and seats[name].model is None))
        and not (name == JUDGE and environment.drop_judge)
    ]


def _examples(
    config: RunConfig, where: str, environment: EnvironmentConfig, loaded: LoadedEnvironment
) -> Iterator[Finding]:
    """Yield findings of the examples: none left to train on, and the counts of those that are left out."""
    facts, long_prompts, num_examples = loaded.facts, loaded.long_prompts, loaded.examples.num_rows
    if config.kind == "train" and environment in config.environments and "train" not in texts(loaded.examples["split"]):
        yield (
            True,
            f"{where}.holdout_fraction: all {num_examples} examples are held out ({environment.holdout_fraction:g}), "
            "and none is left to train on; lower it",
        )
    if facts.num_beyond:
        yield (
            False,
            f"{where}.max_examples: the first {environment.max_examples:,} examples are read, {facts.num_beyond} more "
            "are left out; raise max_examples to read them",
        )
    if facts.num_repeated:
        yield False, f"{where}: {facts.num_repeated:,} examples repeat earlier ones and are left out"
    if long_prompts:
        yield (
            False,
            f"{where}.max_prompt_tokens: {len(long_prompts)} of {num_examples + len(long_prompts)} examples are left "
            f"out: their first prompts have more than {environment.max_prompt_tokens} tokens, up to "
            f"{max(long_prompts)}",
        )


def _images_of_several(where: str, loaded: LoadedEnvironment) -> Iterator[Finding]:
    tasks = texts(loaded.examples["task"][:FIRST])
    if len(loaded.facts.seats) > 1 and any('"image_url"' in task for task in tasks):
        yield (
            True,
            f"{where}: prompts show images, and it has the seats {', '.join(loaded.facts.seats)}: several agents with "
            "images are not supported. Take an environment of one seat, or describe the images in words",
        )


def _unbound(environment: EnvironmentConfig, loaded: LoadedEnvironment) -> Iterator[str]:
    """Yield the first thing wrong with the models that play the first episodes."""
    try:
        bindings = SeatBindings([environment], 0)
        for row in loaded.examples.slice(0, FIRST).to_pylist() if environment.bindings else ():
            binding = bindings.of({**row, "group_id": "0", "member": 0, "seed": 0}, json.loads(row["task"]))
            require_named("seat", binding, loaded.facts.seats)
    except Exception as error:  # of a user's function
        yield f"{type(error).__name__}: {error}"


def _rewards(config: RunConfig, where: str, environment: EnvironmentConfig, facts: EnvironmentFacts) -> list[Finding]:
    """Return a finding for rewards that nothing gives: it stops a run that trains on them."""
    if facts.scores or environment.group_rewards:
        return []
    algorithm = config.algorithm_of(environment.name)
    trains = environment in config.environments and config.computes("advantage")
    stops = trains and not isinstance(algorithm, ImitationSection | CustomConfig)
    why = f"{where}: the tasks of {environment.name!r} have no reward function and no judge, so every reward is 0"
    what = (
        f" and {algorithm.type!r} has nothing to learn from. Give its task class a method with @vf.reward, or name "
        f"functions in {where}.taskset.task.rewards"
    )
    return [(stops, why + what if stops else why)]


def _keys(where: str, environment: EnvironmentConfig, facts: EnvironmentFacts) -> Iterator[Finding]:
    """Yield a finding for each key of an environment's own models that its process does not get."""
    secrets = withheld(needed_by(environment))
    for variable, url in facts.keys.items():
        use = f"{environment.name!r} asks a model at {url} with the key in {variable}"
        if variable in secrets:
            yield (
                True,
                f"{where}.variables: {use}, which is set here, and secrets reach an environment only where they are "
                f'named: variables = ["{variable}"]',
            )
        elif variable not in os.environ:
            yield False, f"{where}: {use}, which is not set; where that model wants a key, no rollout will be scored"


def _long_first_prompts(room: int, where: str, examples: pa.Table, count: Count) -> Iterator[Finding]:
    """Yield a finding where first prompts have more tokens than the context's `room`: it stops a run if all have."""
    prompts = [_prompt_text(json.loads(task))[: room * CHARACTERS] for task in texts(examples["task"][:FIRST])]
    longer = [length for length in count(prompts) or () if length >= room]
    if not longer:
        return
    why = (
        f"{where}: {len(longer)} of the first {len(prompts)} prompts do not fit the context: the longest has at least "
        f"{max(longer)} tokens, engine.max_model_len is {room}"
    )
    if len(longer) == len(prompts):
        yield True, f"{why}. Raise engine.max_model_len as far as the model allows, or shorten the prompts"
    else:
        yield False, f"{why}; their rollouts will end with an error, unless {where}.max_prompt_tokens leaves them out"


def _prompt_text(task: Mapping[str, Any]) -> str:
    """Return the text that a task begins with; without its chat template and parts, so that tokens are counted low."""
    prompt = task.get("prompt") or ""
    contents = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    return "\n".join(
        content for content in (task.get("system_prompt"), *contents) if content and isinstance(content, str)
    )

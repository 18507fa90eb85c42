"""Checks a run's config against its loaded environments: the one place where the two meet, before anything starts.

Pure, but for the variables that the shell has. `tasks.inference.environments.servers.load_all` asks the environments,
`flows.runtime.preflight` and `stagecoach check --load` say what is found.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from configs.algorithms import CustomConfig, ImitationSection
from configs.checks.environments import seat_problems
from configs.environments import EnvironmentConfig
from configs.run import RunConfig, View
from flows.runtime.loop import evaluation_configs
from tasks.arrays.columns import texts
from tasks.arrays.seats import JUDGE
from tasks.assignment.examples import FieldMissing
from tasks.assignment.stage import EVALUATION_STAGE, EvaluationInputs, TooFewExamples, evaluation_assignment
from tasks.inference.environments.introspection import EnvironmentFacts
from tasks.inference.environments.servers import LoadedEnvironment
from tasks.runtime.process_variables import needed_by, withheld

FIRST = 64
"""Prompts of an environment that are counted in tokens."""
CHARACTERS = 16
"""Characters for each token of the context that are counted first: nearly every text so long does not fit."""
Count = Callable[[Sequence[str]], list[int] | None]
"""Returns the tokens of each text, None where there is no tokenizer that can say."""
STOPS, NOTE = True, False
Finding = tuple[bool, str]
"""Whether it stops the run, and its text."""


class Findings(NamedTuple):
    """Problems stop a run; notes are shown and the run continues."""

    problems: list[str]
    notes: list[str]


def environment_findings(config: RunConfig, loaded: Mapping[str, LoadedEnvironment], count: Count) -> Findings:
    """Return what speaks against a run of `config` in its loaded environments, by name; `count` counts tokens."""
    findings = [*_of_run(config, loaded)]
    for index, environment in enumerate(config.environments):
        findings += _of_environment(config, f"environments.{index}", environment, loaded[environment.name], count)
    return Findings([text for stops, text in findings if stops], [text for stops, text in findings if not stops])


def _of_run(config: RunConfig, loaded: Mapping[str, LoadedEnvironment]) -> Iterator[Finding]:
    """Yield the findings of all environments together: seats, examples to train on, held-out examples."""
    if config.computes("advantage"):
        seats = {entry.name: trained_seats(entry, loaded[entry.name].facts) for entry in config.environments}
        yield from ((STOPS, problem) for problem in seat_problems(config, seats))
    if config.kind == "train":
        splits = {name: texts(environment.examples["split"]) for name, environment in loaded.items()}
        for index, environment in enumerate(config.environments):
            if "train" not in splits[environment.name]:
                yield (
                    STOPS,
                    f"environments.{index}.holdout_fraction: all {len(splits[environment.name])} examples of "
                    f"{environment.name!r} are held out ({environment.holdout_fraction:g}), and none is left to train "
                    "on; lower it",
                )
        examples = sum(names.count("train") for names in splits.values())
        groups = config.assignment.groups_per_step
        if 0 < examples < groups:
            yield (
                NOTE,
                f"assignment.groups_per_step: {groups} groups, and there are {examples} examples to train on: each "
                f"step samples an example about {groups / examples:.1f} times",
            )
    yield from ((STOPS, problem) for problem in _evaluation_problems(config, loaded))


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


def _evaluation_problems(config: RunConfig, loaded: Mapping[str, LoadedEnvironment]) -> Iterator[str]:
    """Yield what the stage that chooses held-out examples says, for each evaluation that is due."""
    if config.kind not in ("train", "evaluate"):
        return
    examples = pa.concat_tables([environment.examples for environment in loaded.values()])
    for index, evaluated in enumerate(evaluation_configs(config).values()):
        if config.kind == "train" and not any(map(evaluated.evaluation.due, range(config.steps + 1))):
            continue
        try:
            view = View(evaluated, EVALUATION_STAGE.sections, EVALUATION_STAGE.name)
            evaluation_assignment(EvaluationInputs(examples), view)
        except (TooFewExamples, FieldMissing) as error:
            yield f"{f'evaluation.sets.{index}' if config.evaluation.sets else 'evaluation'}: {error}"


def _of_environment(
    config: RunConfig, where: str, environment: EnvironmentConfig, loaded: LoadedEnvironment, count: Count
) -> Iterator[Finding]:
    """Yield the findings of one environment; `where` is the key of its section."""
    name, facts, limit = environment.name, loaded.facts, environment.max_prompt_tokens
    if facts.num_beyond:
        yield (
            NOTE,
            f"{where}.max_examples: the first {environment.max_examples:,} examples of {name!r} are read, "
            f"{facts.num_beyond} more are left out; raise max_examples to read them",
        )
    if facts.num_repeated:
        yield NOTE, f"{where}: {facts.num_repeated:,} examples of {name!r} repeat earlier ones and are left out"
    if not facts.scores:
        yield _reward_finding(config, where, environment)
    yield from _keys(where, environment, facts)
    if long := loaded.long_prompts:
        yield (
            NOTE,
            f"{where}.max_prompt_tokens: {len(long)} of {loaded.examples.num_rows + len(long)} examples of {name!r} "
            f"are left out: their first prompts have more than {limit} tokens, up to {max(long)}",
        )
    elif limit and not config.model.path:
        yield (
            NOTE,
            f"{where}.max_prompt_tokens: no prompt was counted, because the model and its tokenizer are not here",
        )
    yield from _long_first_prompts(config.engine.max_model_len, where, name, loaded.examples, count)


def _reward_finding(config: RunConfig, where: str, environment: EnvironmentConfig) -> Finding:
    """Return a finding for rewards that nothing gives: it stops a run that trains on them."""
    algorithm = config.algorithm_of(environment.name)
    why = (
        f"{where}: the tasks of {environment.name!r} (taskset {environment.taskset.get('id')!r}) have no reward "
        "function and no judge, so every reward is 0"
    )
    if not config.computes("advantage") or isinstance(algorithm, ImitationSection | CustomConfig):
        return NOTE, why
    return (
        STOPS,
        f"{why} and {algorithm.type!r} has nothing to learn from. Give its task class a method with @vf.reward, or "
        f"name functions in {where}.taskset.task.rewards",
    )


def _keys(where: str, environment: EnvironmentConfig, facts: EnvironmentFacts) -> Iterator[Finding]:
    """Yield a finding for each key of an environment's own models that this shell has and its process does not get."""
    kept_back = withheld(needed_by(environment))
    for variable, url in facts.keys.items():
        use = f"taskset {environment.taskset.get('id')!r} asks a model at {url} with the key in {variable}"
        if variable in kept_back:
            yield (
                STOPS,
                f"{where}.variables: {use}, which is set here, and secrets reach an environment only where they are "
                f'named: variables = ["{variable}"]',
            )
        elif variable not in os.environ:
            yield (
                NOTE,
                f"{where}: {use}, which is not set; where that model wants a key, no rollout will be scored. Set it, "
                "or give the judge another base_url, model and api_key_var in the taskset's settings",
            )


def _long_first_prompts(room: int, where: str, name: str, examples: pa.Table, count: Count) -> Iterator[Finding]:
    """Yield a finding where first prompts have more tokens than the context's `room`: it stops a run if all have."""
    prompts = [_prompt_text(json.loads(task)) for task in texts(examples["task"][:FIRST])]
    longer = [length for length in _count_up_to(room, prompts, count) if length >= room]
    if not longer:
        return
    why = (
        f"{where}: {len(longer)} of the first {len(prompts)} prompts of {name!r} do not fit the context: "
        f"the longest has at least {max(longer)} tokens, engine.max_model_len is {room}"
    )
    if len(longer) == len(prompts):
        yield STOPS, f"{why}. Raise engine.max_model_len as far as the model allows, or shorten the prompts"
    else:
        yield (
            NOTE,
            f"{why}; their rollouts will end with an error. To leave such examples out, set {where}.max_prompt_tokens",
        )


def _count_up_to(room: int, prompts: Sequence[str], count: Count) -> list[int]:
    """Return the tokens of each prompt, of one that has `room` or more at least so many; none without a tokenizer."""
    beginnings = [prompt[: room * CHARACTERS] for prompt in prompts]
    lengths = count(beginnings) or []
    whole = [n for n, length in enumerate(lengths) if length < room and beginnings[n] != prompts[n]]
    for number, length in zip(whole, count([prompts[n] for n in whole]) or [], strict=False):
        lengths[number] = length
    return lengths


def _prompt_text(task: Mapping[str, Any]) -> str:
    """Return the text that a task begins with; without its chat template, so that tokens are counted low."""
    prompt = task.get("prompt") or ""
    messages = [prompt] if isinstance(prompt, str) else [each.get("content") for each in prompt]
    return "\n".join(filter(None, [task.get("system_prompt"), *map(_content_text, messages)]))


def _content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or "") for part in content or () if isinstance(part, Mapping))

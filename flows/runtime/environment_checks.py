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


class Findings(NamedTuple):
    """What was found: problems stop a run, notes are said and it goes on."""

    problems: list[str]
    notes: list[str]


def environment_findings(config: RunConfig, loaded: Mapping[str, LoadedEnvironment], count: Count) -> Findings:
    """Return what speaks against a run of `config` in its loaded environments, by name; `count` counts tokens."""
    found = Findings([], [])
    if config.computes("advantage"):
        seats = {each.name: trained_seats(each, loaded[each.name].facts) for each in config.environments}
        found.problems.extend(seat_problems(config, seats))
    if config.kind == "train":
        found.problems.extend(_without_training_examples(config, loaded))
        found.notes.extend(_few_examples(config, loaded))
    found.problems.extend(_evaluation_problems(config, loaded))
    for index, environment in enumerate(config.environments):
        where, own = f"environments.{index}", loaded[environment.name]
        _note_examples_left_out(where, environment, own, found)
        if not own.facts.scores:
            _judge_unscored(config, where, environment, found)
        _judge_keys(where, environment, own.facts, found)
        _note_long_prompts(config, where, environment, own, found)
        _judge_prompts(config, where, environment, own.examples, count, found)
    return found


def _note_examples_left_out(
    where: str, environment: EnvironmentConfig, loaded: LoadedEnvironment, found: Findings
) -> None:
    facts = loaded.facts
    if facts.num_beyond:
        found.notes.append(
            f"{where}.max_examples: the first {environment.max_examples:,} examples of {environment.name!r} are read, "
            f"{facts.num_beyond} more are left out; raise max_examples to read them"
        )
    if facts.num_repeated:
        repeated = f"{where}: {facts.num_repeated:,} examples of {environment.name!r} repeat earlier ones"
        found.notes.append(f"{repeated} and are left out")


def trained_seats(environment: EnvironmentConfig, facts: EnvironmentFacts) -> list[str]:
    """Return the seats that are trained: those that environment and config let be, which the policy plays."""
    own = environment.seats
    return [
        name
        for name, trainable in facts.seats.items()
        if trainable
        and (name not in own or (own[name].trainable and own[name].model is None))
        and not (name == JUDGE and environment.drop_judge)
    ]


def _without_training_examples(config: RunConfig, loaded: Mapping[str, LoadedEnvironment]) -> Iterator[str]:
    for index, environment in enumerate(config.environments):
        splits = texts(loaded[environment.name].examples["split"])
        if "train" not in splits:
            yield (
                f"environments.{index}.holdout_fraction: all {len(splits)} examples of {environment.name!r} are held "
                f"out ({environment.holdout_fraction:g}), and none is left to train on; lower it"
            )


def _few_examples(config: RunConfig, loaded: Mapping[str, LoadedEnvironment]) -> Iterator[str]:
    """Yield a note where a step has more groups than there are examples to train on."""
    examples = sum(texts(environment.examples["split"]).count("train") for environment in loaded.values())
    groups = config.assignment.groups_per_step
    if 0 < examples < groups:
        yield (
            f"assignment.groups_per_step: {groups} groups, and there are {examples} examples to train on: each step "
            f"samples an example about {groups / examples:.1f} times"
        )


def _evaluation_problems(config: RunConfig, loaded: Mapping[str, LoadedEnvironment]) -> Iterator[str]:
    """Yield what the stage that chooses held-out examples says, for each evaluation that is due."""
    examples = pa.concat_tables([each.examples for each in loaded.values()])
    for index, each in enumerate(evaluation_configs(config).values()):
        due = config.kind == "evaluate" or any(map(each.evaluation.due, range(config.steps + 1)))
        if config.kind not in ("train", "evaluate") or not due:
            continue
        view = View(each, EVALUATION_STAGE.sections, EVALUATION_STAGE.name)
        try:
            evaluation_assignment(EvaluationInputs(examples), view)
        except (TooFewExamples, FieldMissing) as error:
            yield f"{f'evaluation.sets.{index}' if config.evaluation.sets else 'evaluation'}: {error}"


def _judge_unscored(config: RunConfig, where: str, environment: EnvironmentConfig, found: Findings) -> None:
    """Refuse to train on rewards that nothing gives; where they are only shown, say that all are zero."""
    algorithm = config.algorithm_of(environment.name)
    why = (
        f"{where}: the tasks of {environment.name!r} (taskset {environment.taskset.get('id')!r}) have no reward "
        "function and no judge, so every reward is 0"
    )
    if config.computes("advantage") and not isinstance(algorithm, ImitationSection | CustomConfig):
        found.problems.append(
            f"{why} and {algorithm.type!r} has nothing to learn from. Give its task class a method with @vf.reward, or "
            f"name functions in {where}.taskset.task.rewards"
        )
    else:
        found.notes.append(why)


def _judge_keys(where: str, environment: EnvironmentConfig, facts: EnvironmentFacts, found: Findings) -> None:
    """Refuse an environment whose own models read a key that this shell has and its process does not get."""
    kept_back = withheld(needed_by(environment))
    for variable, url in facts.keys.items():
        asked = f"taskset {environment.taskset.get('id')!r} asks a model at {url} with the key in {variable}"
        if variable in kept_back:
            found.problems.append(
                f"{where}.variables: {asked}, which is set here, and secrets reach an environment only where they are "
                f'named: variables = ["{variable}"]'
            )
        elif variable not in os.environ:
            found.notes.append(
                f"{where}: {asked}, which is not set; where that model wants a key, no rollout will be scored. Set it, "
                "or give the judge another base_url, model and api_key_var in the taskset's settings"
            )


def _note_long_prompts(
    config: RunConfig, where: str, environment: EnvironmentConfig, own: LoadedEnvironment, found: Findings
) -> None:
    where, long = f"{where}.max_prompt_tokens", own.long_prompts
    if long:
        found.notes.append(
            f"{where}: {len(long)} of {own.examples.num_rows + len(long)} examples of {environment.name!r} are left "
            f"out: their first prompts have more than {environment.max_prompt_tokens} tokens, up to {max(long)}"
        )
    elif environment.max_prompt_tokens and not config.model.path:
        found.notes.append(f"{where}: no prompt was counted, because the model and its tokenizer are not here")


def _judge_prompts(
    config: RunConfig, where: str, environment: EnvironmentConfig, examples: pa.Table, count: Count, found: Findings
) -> None:
    """Refuse an environment whose first prompts all have more tokens than the context; say where some have."""
    prompts = [_prompt_text(json.loads(task)) for task in texts(examples["task"][:FIRST])]
    room = config.engine.max_model_len
    lengths = _count_up_to(room, prompts, count)
    longer = [length for length in lengths if length >= room]
    if not longer:
        return
    why = (
        f"{where}: {len(longer)} of the first {len(prompts)} prompts of {environment.name!r} do not fit the context: "
        f"the longest has at least {max(longer)} tokens, engine.max_model_len is {room}"
    )
    if len(longer) == len(prompts):
        found.problems.append(f"{why}. Raise engine.max_model_len as far as the model allows, or shorten the prompts")
    else:
        found.notes.append(
            f"{why}; their rollouts will end with an error. To leave such examples out, set {where}.max_prompt_tokens"
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

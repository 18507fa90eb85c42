"""What must hold of how groups are chosen and credited: algorithms, teachers, sampler, refill, admission."""

import re
from collections.abc import Iterator

from configs.algorithms import (
    AlgorithmConfig,
    EchoConfig,
    GroupSection,
    OpsdConfig,
    RaeConfig,
    TeacherConfig,
    teacher_of,
)
from configs.checks.sampling import ENGINE_ALONE, reshaping, trained_sampling
from configs.fields import imported_functions
from configs.run import RunConfig
from configs.sampling import NEUTRAL
from configs.services import ExternalModelConfig

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
PLACE = "{demonstration}"


def algorithm_problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each thing that cannot work of the algorithms that credit rollouts of the run."""
    for where, algorithm in config.used_algorithms.items():
        overlong = algorithm.overlong if isinstance(algorithm, GroupSection) else None
        if overlong is not None and overlong.buffer_tokens > overlong.max_tokens:
            yield (
                f"{where}.overlong.buffer_tokens: {overlong.buffer_tokens} is more than max_tokens, "
                f"{overlong.max_tokens}; the penalty would begin below zero tokens"
            )
        if config.computes("advantage"):
            yield from _credit_problems(config, where, algorithm)
        if config.kind not in ("evaluate", "sft"):  # neither scores nor samples with a teacher
            yield from _teacher_problems(config, where, algorithm)


def _credit_problems(config: RunConfig, where: str, algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.compares_group and config.assignment.group_size == 1:
        yield (
            f"assignment.group_size: {algorithm.type} compares the rollouts of a group; with 1 there is nothing to "
            f"compare ({where})"
        )
    if isinstance(algorithm, RaeConfig) and algorithm.order == "post" and not algorithm.decay:
        yield f"{where}.decay: at 0, order 'post' subtracts the reward itself, so that every advantage is zero"
    if isinstance(algorithm, EchoConfig):
        yield from _echo_problems(where, algorithm)
    for each in imported_functions(algorithm, f"{where}."):
        if not IMPORT_PATH.fullmatch(each.path):
            yield f"{each.key}: {each.path!r} is no import path; write it as package.module:function"


def _echo_problems(where: str, algorithm: EchoConfig) -> Iterator[str]:
    if not (algorithm.system or algorithm.user or algorithm.tool):
        yield f"{where}: without a role (tool, user, system) echo adds nothing to grpo; name one, or choose grpo"
    for role, section in (("system", algorithm.system), ("user", algorithm.user)):
        if section is not None and section.tool_names is not None:
            yield f"{where}.{role}.tool_names: only results of tools have a tool's name; leave it out"
    if algorithm.tool is not None and algorithm.tool.tool_names == ():
        yield f"{where}.tool.tool_names: it names no tool; null is every tool, and {where}.tool=null is none"
    if algorithm.arguments and not algorithm.keep_mask:
        yield f"{where}.arguments: there is no keep_mask that would be given them"
    if algorithm.in_parts and not algorithm.keep_mask:
        yield f"{where}.in_parts: there is no keep_mask that would be called; all else is done in parts anyway"


def _teacher_problems(config: RunConfig, where: str, algorithm: AlgorithmConfig) -> Iterator[str]:
    teacher = teacher_of(algorithm)
    # A run of preferences fills it in.
    if teacher and not (config.kind == "dpo" and teacher == TeacherConfig()):
        yield from frozen_model_problems(f"{where}.teacher", teacher, algorithm.sampled_by == "teacher")
        if teacher.chat and config.kind == "train" and not config.assignment.refill:
            yield (
                f"assignment.refill: replies of {where}.teacher.chat may fail, and their step would have fewer "
                "rollouts; set true, so that groups of other examples take their place"
            )
        settings = trained_sampling(config, _environment_indices(config, where)) if teacher.chat else ()
        for key in settings:
            if key.rpartition(".")[2] in ENGINE_ALONE or ".extra_body." in key:
                yield f"{key}: {where}.teacher.chat has no such field; name it in {where}.teacher.chat.settings"
    if isinstance(algorithm, OpsdConfig) and PLACE not in algorithm.template:
        yield f"{where}.template: it shows no demonstration; put {PLACE} where it belongs"
    if algorithm.scored_by:
        yield from _temperature_problems(config, where, algorithm)


def frozen_model_problems(where: str, model: TeacherConfig, samples: bool) -> Iterator[str]:
    """Yield what is wrong with the place of a frozen model at `where`; only one that `samples` may be a chat API."""
    places = (model.path, model.url, model.chat, getattr(model, "beside", ""))
    if sum(map(bool, places)) != 1:
        said = "both are set" if any(places) else "neither is set"
        yield f"{where}: give the path of its weights, or the url of an engine that serves it; {said}"
    if model.chat:
        yield from chat_problems(f"{where}.chat", model.chat)
        if not samples:
            yield f"{where}.chat: it shows no tokens and scores none; give path or url, or take the algorithm sft"


def chat_problems(where: str, chat: ExternalModelConfig) -> Iterator[str]:
    """Yield what is wrong with the chat API at `where`."""
    if not chat.url.startswith(("http://", "https://")) or not chat.model:
        yield f"{where}: give the url of a chat API (https://host/v1), and the name of a model there"


def _temperature_problems(config: RunConfig, where: str, algorithm: AlgorithmConfig) -> Iterator[str]:
    why = (
        f"{algorithm.type} compares with log-probs of the reference, which engines give a prompt at temperature 1 and "
        "over the whole vocabulary only; it needs"
    )
    settings = trained_sampling(config, _environment_indices(config, where))
    temperatures = {key: value for key, value in settings.items() if key.endswith(".temperature") and value != 1}
    for key, value in {**temperatures, **reshaping(settings)}.items():
        yield f"{key}: {value}: {why} {NEUTRAL.get(key.rpartition('.')[2], 1)}"


def _environment_indices(config: RunConfig, where: str) -> set[int]:
    """Return the environments of an algorithm: that of the run has those that have none of their own."""
    return {
        index
        for index, each in enumerate(config.environments)
        if where == (f"environments.{index}.algorithm" if each.algorithm else "algorithm")
    }


def assignment_problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each thing that cannot work of the sections that say which examples a step tries."""
    assignment, admission = config.assignment, config.admission
    drops_incomplete = any(each.type == "incomplete_group" and each.enforce for each in config.filtering.filters)
    if assignment.refill and config.from_data:
        yield f"assignment.refill: data are what they are; a run of kind {config.kind} has no groups to replace"
    if assignment.refill and config.filtering.max_batch_attempts < 2:
        yield (
            "assignment.refill: filtering.max_batch_attempts is 1, which leaves no second batch to replace groups; "
            "give it 2 or more"
        )
    if assignment.sampler.stateful and config.from_data:
        yield (
            f"assignment.sampler: {assignment.sampler.type} goes by the policy's rewards, and data have none; a run of "
            f"kind {config.kind} needs 'standard'"
        )
    if assignment.sampler.stateful and not assignment.shuffle:
        yield f"assignment.shuffle: {assignment.sampler.type} draws at random; dataset order needs sampler 'standard'"
    # In a stream no member of a group is stopped without the others.
    in_turn = config.rollout.max_off_policy_steps < 2 or (config.kind == "replay" and config.computes("rollout"))
    if assignment.oversampling > 1 and in_turn and config.computes("filtering") and not drops_incomplete:
        yield (
            f"assignment.oversampling: {assignment.oversampling:g} begins more groups than are trained on, and what "
            "has ended of a stopped group are its short rollouts: a baseline of those rewards being short. Add "
            '{ type = "incomplete_group" }, enforced, to filtering.filters'
        )
    if admission is not None and admission.reject_min > admission.reject_max:
        yield (
            f"admission: the range from {admission.reject_min} to {admission.reject_max} is empty, so it refuses "
            "nothing; swap the two, or leave the section out"
        )
    if assignment.refill and config.computes("assignment", "advantage"):
        yield from _refill_problems(config)


def _refill_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each algorithm whose groups without signal would be trained on and never replaced."""
    gate = config.admission
    # Such a gate refuses every group without signal, whoever made it so.
    if gate is not None and gate.reject_min <= 0 <= gate.reject_max:
        return
    filtered = any(each.type == "zero_advantage" and each.enforce for each in config.filtering.filters)
    for where, algorithm in config.used_algorithms.items():
        shaped = isinstance(algorithm, GroupSection) and algorithm.shaped
        if algorithm.compares_group and (shaped or not filtered):
            why = (
                "rewards are shaped, which zero_advantage does not see" if shaped else "zero_advantage is not enforced"
            )
            yield (
                f"assignment.refill: groups whose advantages are all zero would not be replaced ({where}: {why}); set "
                "admission={}, a gate that refuses them"
            )

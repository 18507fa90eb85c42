"""What must hold of environments, of who plays their seats, and of what evaluations try of them."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from configs.checks.algorithms import chat_problems, frozen_model_problems
from configs.environments import POLICY, EnvironmentConfig
from configs.errors import did_you_mean
from configs.evaluation import EvaluationConfig, EvaluationEnvironment, SetSettings
from configs.run import RunConfig

OF_OUR_SERVERS = ("servers", "pool", "variables", "sandbox_labels", "startup_seconds", "hang_seconds", "max_restarts")
"""What is said about a server that the run starts, and means nothing to one that is there."""

OF_TRAINING = ("algorithm", "weight", "holdout_seed")
"""What means nothing to an environment that is never trained on."""
OF_A_TASKSET = tuple(
    name
    for name in EnvironmentConfig.model_fields
    if name not in ("taskset", "holdout_fraction", *SetSettings.model_fields)
)
"""What is said of an environment where it has its taskset."""
MAX_PORT = 65535

SCORINGS = ("exact", "contains", "number")
"""The names that the taskset `own_data` has for a way of scoring."""


def environment_problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each thing in the environments' sections that cannot work."""
    environments = config.served_environments
    if not environments and not config.from_data:
        yield (
            f"environments: a run of kind {config.kind} needs at least one: write [[environments]], or name a preset "
            "before the file, such as demo"
        )
    names = Counter(environment.name for environment in environments.values())
    for name, count in names.items():
        if count > 1:
            yield f"environments: {count} of them are named {name!r}; the tables tell them apart by name"
    for name, count in Counter(name for each in environments.values() for name in each.server_names).items():
        if count > 1 and names[name] < 2:
            yield (
                f"environments: {count} servers are named {name!r}, of which one is that of an environment with "
                "several; logs tell them apart by name: give the environments other names"
            )
    for where, environment in environments.items():
        if not isinstance(environment.taskset.get("id"), str) or not environment.taskset["id"]:
            yield f"{where}.taskset.id: say which installed verifiers taskset it is"
        yield from _scoring(where, environment)
        yield from _env(where, environment)
        yield from _players(config, where, environment)
        yield from _evaluation_seat(where, environment)
        yield from _server(where, environment)
        if environment.long_prompts != "drop" and environment.max_prompt_tokens is None:
            yield f"{where}.long_prompts: no prompt is too long without a limit; set {where}.max_prompt_tokens"
        if environment.max_prompt_tokens and config.external:
            yield f"{where}.max_prompt_tokens: the tokenizer of the model at {config.external.url} is not known here"


def _server(where: str, environment: EnvironmentConfig) -> Iterator[str]:
    fields = EnvironmentConfig.model_fields
    for name in OF_OUR_SERVERS if environment.address else ():
        if getattr(environment, name) != fields[name].get_default(call_default_factory=True):
            yield (
                f"{where}.{name}: the environment server at {environment.address} is someone else's, and is neither "
                "started nor watched here; leave this out, or leave address empty"
            )
    for address in environment.addresses:
        port = re.fullmatch(r"tcp://[^/]+:(\d+)", address)
        if not port or int(port[1]) > MAX_PORT:
            yield f"{where}.address: {address!r} is no address of a server; write tcp://HOST:PORT"
    places = [environment.taskset, environment.env, environment.harness, environment.runtime]
    places += [place for seat in environment.seats.values() for place in (seat.harness, seat.runtime)]
    if environment.sandbox_labels and not any(map(_has_labels, places)):
        yield (
            f"{where}.sandbox_labels: nothing here runs in a sandbox that takes labels, and they would be on nothing; "
            'leave them out, or use the runtime { type = "prime" }'
        )


def _has_labels(settings: Any) -> bool:
    """Whether a runtime with labels is named anywhere among settings: those of tool servers are deeper down."""
    if isinstance(settings, Mapping):
        return settings.get("type") == "prime" or any(map(_has_labels, settings.values()))
    return isinstance(settings, list | tuple) and any(map(_has_labels, settings))


def _scoring(where: str, environment: EnvironmentConfig) -> Iterator[str]:
    task = environment.taskset.get("task")
    scoring = task.get("scoring") if isinstance(task, Mapping) else None
    is_word = isinstance(scoring, str) and ":" not in scoring
    if environment.taskset.get("id") == "own_data" and is_word and scoring not in SCORINGS:
        yield (
            f"{where}.taskset.task.scoring: {scoring!r} is neither {', '.join(SCORINGS)} nor the import path of a "
            f"function, module:function{did_you_mean(str(scoring), SCORINGS)}"
        )


def _env(where: str, environment: EnvironmentConfig) -> Iterator[str]:
    if not isinstance(environment.env.get("id", ""), str):
        yield f"{where}.env.id: {environment.env['id']!r} is no name of a verifiers environment, such as best-of-n"
    if "taskset" in environment.env:
        yield f"{where}.env.taskset: the taskset has a section of its own, {where}.taskset"


def _players(config: RunConfig, where: str, environment: EnvironmentConfig) -> Iterator[str]:
    for key, player in environment.players.items():
        yield from frozen_model_problems(f"{where}.{key}", player, samples=False)
        if player.beside and config.kind == "train" and config.training.lora is None:
            yield f"{where}.{key}: base and earlier policies are served below adapters (training.lora); give a path"
    if environment.bindings and POLICY in environment.bindings.models:
        yield f"{where}.bindings.models.{POLICY}: this is the name of the policy; take another"
    for key in [*environment.players, *["bindings"] * bool(environment.bindings)] if environment.address else ():
        yield (
            f"{where}.{key}: the environment server at {environment.address} is someone else's and takes no models for "
            "single seats; leave address empty, or let that server bind the seat itself"
        )


def _evaluation_seat(where: str, environment: EnvironmentConfig) -> Iterator[str]:
    name = environment.evaluation_seat
    seat = environment.seats.get(name)
    if seat is not None and seat.model is not None:
        yield f"{where}.evaluation_seat: {name!r} is played by a frozen model; name a seat that the policy plays"
    elif seat is not None and not seat.trainable:
        yield (
            f"{where}.evaluation_seat: {name!r} has trainable = false, and evaluations count no such seat: none of its "
            "rollouts would be in any figure; name one that is trained"
        )
    if name == "judge" and environment.drop_judge:
        yield f"{where}.evaluation_seat: the judge is left out by drop_judge; name a player's seat"


def seat_problems(config: RunConfig, trained: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Yield one line for each environment whose algorithm does not fit its trained seats, given by environment.

    An algorithm that keeps no agents apart would average rewards of different seats. One that has a baseline for each
    is refused for a single one, and environments of both kinds are refused in one run. Neither is judged where each
    episode trains one seat of several (`learner_seat`).
    """
    single: list[str] = []
    several: list[str] = []
    for index, environment in enumerate(config.environments):
        name = environment.name
        if name not in trained or environment.learner_seat:
            continue
        seats = sorted(trained[name])
        where = f"environments.{index}.algorithm.type" if environment.algorithm else "algorithm.type"
        algorithm = config.algorithm_of(name)
        if not seats:
            yield f"environments.{index}.seats: no seat of {name!r} is trained; set trainable = true for one"
        elif len(seats) > 1 and not algorithm.per_agent:
            yield (
                f"{where}: environment {name!r} trains {len(seats)} seats ({', '.join(seats)}), and {algorithm.type!r} "
                "would compare their rewards, which are of different seats. Choose rae or hierarchical_grpo, or train "
                f"one seat: environments.{index}.seats.{seats[-1]}.trainable=false"
            )
        elif len(seats) == 1 and not algorithm.single_agent:
            yield (
                f"{where}: {algorithm.type!r} has a baseline for each of several trained seats, and environment "
                f"{name!r} trains one ({seats[0]}). Choose an algorithm for one seat (grpo, rloo)"
            )
        (several if len(seats) > 1 else single).append(name)
    if single and several:
        yield (
            f"environments: {several[0]!r} trains several seats and {single[0]!r} one, and a run holds environments of "
            "one kind; train each kind in a run of its own, the second from the weights of the first"
        )


def evaluation_problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each thing about the evaluations of a run that cannot work."""
    tables = config.evaluation.tables
    names = Counter(entry.name for entry in (*config.evaluation.sets, *tables.values()))
    for name, count in names.items():
        if count > 1:
            where = (
                "evaluation.environments" if name in {table.name for table in tables.values()} else "evaluation.sets"
            )
            yield f"{where}: {count} of them are named {name!r}; tables and notes tell them apart by name"
    # Not strict: of sets of one name, which were reported above, the last alone is there.
    for where, chosen in zip(config.evaluation.set_keys, config.evaluation.of_sets().values(), strict=False):
        yield from _set_problems(config, where, chosen)
    for where, table in tables.items():
        for name in OF_TRAINING if table.taskset else OF_A_TASKSET:
            if getattr(table, name) != EvaluationEnvironment.model_fields[name].get_default(call_default_factory=True):
                why = (
                    "is never trained on" if table.taskset else "has no taskset, and stands for one that is trained on"
                )
                yield f"{where}.{name}: environment {table.name!r} {why}; leave this out"
    yield from _external_problems(config)


def _set_problems(config: RunConfig, where: str, chosen: EvaluationConfig) -> Iterator[str]:
    for k in chosen.pass_at:
        if not 1 <= k <= chosen.attempts:
            yield f"{where}.pass_at: pass@{k} needs k from 1 to {where}.attempts, which is {chosen.attempts}"
    known = {each.name: each for each in config.served_environments.values()}
    trained = () if config.from_data else [entry.name for entry in config.environments]
    for name in chosen.environments:
        if name not in known:
            key = f"{where}.taskset" if where in config.evaluation.tables else f"{where}.environments"
            has = f"it has {', '.join(known) or 'none'}{did_you_mean(str(name), known)}"
            yield f"{key}: the run has no environment {name!r}; {has}"
    if config.from_data and chosen.every and not chosen.environments:
        yield (
            f"{where}.every: a run of kind {config.kind} trains in no environment, so nothing is held out; "
            "write tables [[evaluation.environments]] for those that it is evaluated in, or take 0"
        )
    for name in chosen.environments or trained:
        if name in known and not known[name].holdout_fraction and (config.kind == "evaluate" or chosen.every):
            yield f"{where}: environment {name!r} holds out nothing to evaluate on; set its holdout_fraction above 0"
    for field, values in chosen.where.items():
        if not values:
            yield f"{where}.where.{field}: no value is wanted, so no example would be tried"


def _external_problems(config: RunConfig) -> Iterator[str]:
    external = config.evaluation.external
    if external is None:
        return
    if config.kind != "evaluate":
        yield (
            f"evaluation.external: a run of kind {config.kind} has policies of its own; someone else's model is only "
            "ever evaluated (stagecoach eval), never trained on"
        )
    for where, environment in config.served_environments.items():
        if environment.bindings or environment.players:
            yield (
                f"{where}.seats: frozen models of seats play beside policies of ours, whose tokenizer "
                "they share; an evaluation of evaluation.external has no such model"
            )
    if config.evaluation.policy:
        yield "evaluation.policy: evaluation.external is tried in place of a policy; name one of the two"
    yield from chat_problems("evaluation.external", external)

"""What an environment's code says of itself: its seats, whether it scores, its settings; asked in its own process.

A config is checked against these facts before anything starts (`flows.runtime.preflight`).
"""

import asyncio
import inspect
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError
    from verifiers.v1.env import Env
    from verifiers.v1.task import Task

FORMER_HOOKS = ("tools", "user")
"""Hooks of tasks and tasksets that verifiers had before 0.3 and no longer calls."""
RECORDS_REWARD = re.compile(r"record_reward|\.rewards?\b")
"""Code of a task that gives a reward by itself."""
SETUP_SECONDS = 5.0
"""Longest wait for an environment's `setup`, which only says which agents are trainable."""


class FormerInterface(ValueError):
    """A task has hooks of an earlier verifiers, which nothing calls any more: it would run without tools or user."""


class LostTaskConfig(ValueError):
    """A task is made with settings that its server would not have: it makes each task anew, of its data alone."""


@dataclass(frozen=True)
class EnvironmentFacts:
    """What a config cannot say of an environment."""

    seats: Mapping[str, bool]
    """Every agent by name, and whether the environment lets it be trained."""
    scores: bool
    """Whether anything may give a reward: a reward function, a judge, or code of its own."""
    settings: Sequence[str] = ()
    """The settings that its taskset takes."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """The variables that models of its own, such as judges, read their keys from, and where each is asked."""
    num_repeated: int = 0
    """Examples that were left out as equal to an earlier one."""
    num_beyond: str = ""
    """How many examples follow the first `max_examples`, in words; empty where none does or the taskset is endless."""


def facts_of(env: "Env[Any]", task: "Task[Any] | None") -> EnvironmentFacts:
    """Return the facts of a loaded environment, of which `task` is the first; None where it has none.

    Raises FormerInterface, LostTaskConfig, and ValueError where a harness and a runtime do not fit.
    """
    classes = [type(env.taskset), type(env.taskset).task_type(), *([type(task)] if task else [])]
    for each in dict.fromkeys(classes):
        _refuse_former_hooks(each)
    _require_pairing(env, task)
    if task is not None:
        _refuse_own_config(task, env.config.taskset.task)
    settings = tuple(type(env.config.taskset).model_fields)
    return EnvironmentFacts(_seats(env), task is None or _scores(env, task), settings, _keys(env.config.taskset))


def _keys(settings: Any) -> dict[str, str]:
    """Return the variables of all clients among settings, and the addresses that they ask."""
    from pydantic import BaseModel
    from verifiers.v1.configs.client import BaseClientConfig

    if isinstance(settings, list | tuple):
        return {name: url for each in settings for name, url in _keys(each).items()}
    if not isinstance(settings, BaseModel):
        return {}
    own = {settings.api_key_var: settings.base_url} if isinstance(settings, BaseClientConfig) else {}
    own = {name: url for name, url in own.items() if not url.startswith("judge://")}  # the run's own judges
    return own | _keys([getattr(settings, name) for name in type(settings).model_fields])


def settings_error(error: "ValidationError", taskset: str) -> str:
    """Return what is wrong with an environment's settings, and for unknown ones of its taskset what it takes."""
    from verifiers.v1.configs.taskset import TasksetConfig
    from verifiers.v1.utils.loaders import taskset_config_type

    names = [name for name in taskset_config_type(taskset).model_fields if name not in TasksetConfig.model_fields]
    lines, takes = list[str](), ""
    for problem in error.errors():
        section, *path = [*map(str, problem["loc"])] or [""]
        where = ".".join([section, *path])
        if problem["type"] != "extra_forbidden":
            lines.append(f"{where}: {problem['msg']}; it is {reprlib.repr(problem['input'])}")
            continue
        lines.append(f"{where}: unknown setting")
        if section == "taskset" and len(path) == 1:
            if near := get_close_matches(path[0], names, 1):
                lines[-1] += f"; did you mean {near[0]}?"
            else:
                takes = f". The taskset takes: {', '.join(names) or 'no settings of its own'}"
    return "; ".join(lines) + takes


def _refuse_former_hooks(kind: type) -> None:
    # Classes of verifiers have none; a package that serves both interfaces says so by the hook of today.
    own = {name: value for each in reversed(_own_classes(kind)) for name, value in vars(each).items()}
    found = [name for name in FORMER_HOOKS if name in own and not isinstance(own[name], property)]
    if "toolsets" in own or not found:
        return
    raise FormerInterface(
        f"{kind.__name__} has {' and '.join(f'`{name}`' for name in found)} of its own, from an earlier interface of "
        "verifiers: nothing calls it, so that rollouts would silently have no tools and no user. Install a version of "
        "the package for verifiers 0.4, or define `toolsets` (tools) and the environment `user-sim` (user)"
    )


def _refuse_own_config(task: "Task[Any]", settings: Any) -> None:
    own = type(task.config)
    if not isinstance(settings, own):
        raise LostTaskConfig(
            f"{type(task).__name__} is made with a config of its own ({own.__name__}), and a server makes each task "
            f"anew with the settings taskset.task ({type(settings).__name__}), which lack what it reads. The package "
            f"has to name {own.__name__} as the third parameter of vf.Task, and to keep in a task's data what differs "
            "between tasks"
        )


def _require_pairing(env: "Env[Any]", task: "Task[Any] | None") -> None:
    """Raise ValueError where a seat cannot play on its runtime; verifiers says so only when a rollout begins."""
    from verifiers.v1.envs.single_agent import SingleAgentEnv
    from verifiers.v1.task import Task
    from verifiers.v1.utils.compile import validate_pairing

    # In an environment of several seats a seat may get a task of its own, of which nothing is known yet.
    kind = type(task) if task is not None and isinstance(env, SingleAgentEnv) else Task
    for name, seat in env._agent_specs.items():
        try:
            validate_pairing(env._harnesses[name], kind, seat.runtime)
        except ValueError as error:  # which names options of verifiers' own command
            raise ValueError(
                f"seat {name}: {error} In a config these are `harness` and `runtime` of the environment"
            ) from error
        if require_command := getattr(env._harnesses[name], "require_command", None):
            require_command(seat.runtime)


def _seats(env: "Env[Any]") -> dict[str, bool]:
    from verifiers.v1.agent import Agents

    # `setup` says which agents are never trained, and agents that can do nothing else are enough for that.
    agents = Agents(env.config, lambda name, spec: SimpleNamespace(name=name, config=spec, trainable=True))
    try:
        asyncio.run(asyncio.wait_for(env.setup(agents), SETUP_SECONDS))
    except Exception:  # it does more than that: all of its seats may be trained then
        return dict.fromkeys(agents._agents, True)
    return {name: bool(agent.trainable) for name, agent in agents._agents.items()}


def _scores(env: "Env[Any]", task: "Task[Any]") -> bool:
    """Tell whether anything may give a reward. Code that is not understood may."""
    from verifiers.v1.env import Env
    from verifiers.v1.envs.single_agent import SingleAgentEnv
    from verifiers.v1.task import Task

    plain = type(env).run is SingleAgentEnv.run and type(env).finalize is Env.finalize
    if not plain or task.hooks("reward") or task.plugged_judges():
        return True
    if any(getattr(type(task), name) is not getattr(Task, name) for name in ("score", "finalize", "setup")):
        return True
    try:
        return any(RECORDS_REWARD.search(inspect.getsource(each)) for each in _own_classes(type(task)))
    except (OSError, TypeError):  # its source is not here
        return True


def _own_classes(kind: type) -> list[type]:
    return [each for each in kind.__mro__ if each is not object and not each.__module__.startswith("verifiers.")]

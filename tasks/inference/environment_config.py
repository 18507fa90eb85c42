"""The verifiers config of an environment: what its section of our config becomes in the environment's own process."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiers.v1.configs.env import EnvConfig

PLAYER = ("model", "client", "sampling")
"""What of a seat says who plays it: that is not the environment's to choose, or rows would name the wrong model."""


class UnknownSeat(ValueError):
    """A config has settings of a seat that its environment does not have."""


def resolved(environment: Mapping[str, Any]) -> "EnvConfig":
    """The verifiers config of an environment: our harness, runtime and turn limit on every seat that it declares.

    Settings of one seat go before those of all. Raises UnknownSeat where a seat is named that is not there, and what
    verifiers raises of an environment or a setting that it does not know.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type, resolve_env_config

    own = dict(environment.get("env") or {})
    kind = env_config_type(environment["taskset"]["id"], own.get("id", ""))
    names = [name for name, field in kind.model_fields.items() if isinstance(field.default, AgentConfig)]
    named = {f"seats.{name}": name for name in environment.get("seats") or {}}
    if environment.get("evaluation_seat"):
        named["evaluation_seat"] = environment["evaluation_seat"]
    for key, name in named.items():
        if name not in names:
            raise UnknownSeat(f"{key}: the environment has no seat {name!r}; its seats are {', '.join(names)}")
    seats = {name: _seat(environment, name, own.get(name) or {}) for name in names}
    return resolve_env_config({**own, "taskset": environment["taskset"], **seats})


def _seat(environment: Mapping[str, Any], name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one seat: those of all seats, those that `env` has for it, and those of its own section."""
    for key in PLAYER:
        if key in settings:
            raise ValueError(
                f"env.{name}.{key}: who plays a seat is set in the section seats.{name}, as model and temperature"
            )
    seat = {"harness": environment["harness"], "runtime": environment["runtime"]}
    if environment.get("max_turns") is not None:
        seat["max_turns"] = environment["max_turns"]
    own = (environment.get("seats") or {}).get(name) or {}
    set_here = {key: own[key] for key in ("harness", "runtime", "max_turns") if own.get(key)}
    if own.get("temperature") is not None:
        set_here["sampling"] = {"temperature": own["temperature"]}
    return {**seat, **settings, **set_here}

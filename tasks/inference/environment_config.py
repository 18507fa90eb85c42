"""The verifiers config of an environment: what its section of our config becomes in the environment's own process."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiers.v1.configs.env import EnvConfig


def resolved(environment: Mapping[str, Any]) -> "EnvConfig":
    """The verifiers config of an environment: our harness, runtime and turn limit on every seat that it declares."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type, resolve_env_config

    seat = {"harness": environment["harness"], "runtime": environment["runtime"]}
    if environment.get("max_turns") is not None:
        seat["max_turns"] = environment["max_turns"]
    fields = env_config_type(environment["taskset"]["id"]).model_fields
    seats = [name for name, field in fields.items() if isinstance(field.default, AgentConfig)]
    return resolve_env_config({"taskset": environment["taskset"], **{name: dict(seat) for name in seats}})

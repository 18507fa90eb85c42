"""How a process of ours is started: its command, and its environment variables, all but secrets it has no need of.

A list of all that a process may need would break with every variable of CUDA, NCCL or a library; secrets are known by
their names, and few processes need any.
"""

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from configs.secrets import holds_password, is_secret_name, texts

if TYPE_CHECKING:
    from configs.environments import EnvironmentConfig

HUGGING_FACE = ("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN")
"""What loads models and data sets that are not public."""
OF_STARTERS = ("PYTHONSAFEPATH",)
"""Set for a flow run by its deployment. Our own processes need it not, and a script that an environment starts may
import what lies beside it."""
BIND = "STAGECOACH_BIND"
"""The variable that tells a service which address of its machine to bind."""
OF_RUNTIMES = {"prime": "PRIME_*", "modal": "MODAL_*", "daytona": "DAYTONA_*"}
"""What runtimes elsewhere take, by the type that a config names."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a process of its own.

    With -P, files of the current directory do not stand in for installed packages.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def bind_address() -> str:
    """Return the address that a service binds: loopback, unless its machine serves a run of another one."""
    return os.environ.get(BIND, "127.0.0.1")


def inherited_variables(needed: Collection[str] = ()) -> dict[str, str]:
    """Return this process's variables for one that it starts: without secrets, but for those that are `needed`.

    These go by name; `AWS_*` are all that begin so. Numbers of GPUs are those of nvidia-smi, if nothing else is set.
    """
    left_out = {*withheld(needed), *OF_STARTERS}
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | variables


def withheld(needed: Collection[str] = ()) -> list[str]:
    """Return the names of the secrets among this process's variables that such a process does not get, sorted."""
    return sorted(name for name, value in os.environ.items() if _is_secret(name, value) and not _among(name, needed))


def _is_secret(name: str, value: str) -> bool:
    # A proxy is for everybody who goes through it, its password too.
    return is_secret_name(name) or (holds_password(value) and not name.upper().endswith("_PROXY"))


def _among(name: str, needed: Collection[str]) -> bool:
    return any(name == each or (each.endswith("*") and name.startswith(each[:-1])) for each in needed)


def needed_by(environment: "EnvironmentConfig") -> tuple[str, ...]:
    """Return the secrets that the process of an environment gets: what its section names, anywhere, and its runtimes'.

    A taskset, a harness or a runtime names a variable that it reads (`api_key_var`, `forward_env`); what its code
    reads without a word is named in `variables`. Keys of teachers and of frozen seats travel with requests.
    """
    section = environment.model_dump(
        mode="json", exclude={"algorithm": True, "bindings": True, "seats": {"__all__": {"model"}}}
    )
    return (*HUGGING_FACE, *environment.variables, *_names_in(section))


def _names_in(section: Mapping[str, object]) -> Iterator[str]:
    for _, value in texts(section):
        if value in os.environ:
            yield value
        if value in OF_RUNTIMES:
            yield OF_RUNTIMES[value]

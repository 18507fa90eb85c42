"""Says what can be set of an installed environment: `python -m tasks.inference.environments.describe ID FILE`.

In a process of its own, which alone imports the environment's package and verifiers.
"""

import ast
import inspect
import itertools
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.runtime.imports import look_in_working_directory

if TYPE_CHECKING:
    from pydantic import BaseModel


def main(argv: Sequence[str]) -> int:
    """Write settings and seats of the taskset of an id to a file, as JSON; return 0."""
    look_in_working_directory()
    name, target = argv
    Path(target).write_text(json.dumps(description(name)), encoding="utf-8")
    return 0


def description(taskset: str) -> dict[str, Any]:
    """Return the settings of a taskset, those of the environment that it brings, and the environment's seats.

    What all tasksets and environments have is left out. Raises what verifiers raises where it cannot be loaded.
    """
    from verifiers.v1 import SingleAgentEnvConfig, TaskConfig, TasksetConfig
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type, taskset_config_type

    settings, env = taskset_config_type(taskset), env_config_type(taskset, "")
    seats = [name for name, field in env.model_fields.items() if isinstance(field.default, AgentConfig)]
    own = [*_settings(settings, "", {*TasksetConfig.model_fields, "task"})]
    task = settings.model_fields["task"].get_default(call_default_factory=True)
    own += _settings(type(task), "task.", set(TaskConfig.model_fields)) if task is not None else []
    of_env = _settings(env, "", {*SingleAgentEnvConfig.model_fields, *seats})
    return {"settings": own, "env": [*of_env], "seats": seats}


def _settings(section: "type[BaseModel]", prefix: str, known: set[str]) -> Iterator[dict[str, Any]]:
    meanings = _docstrings(section)
    for name, field in section.model_fields.items():
        if name in known:
            continue
        default: Any = None if field.is_required() else field.get_default(call_default_factory=True)
        try:
            plain = json.loads(json.dumps(default))
        except (TypeError, ValueError):  # a section of its own, or a path
            plain = default.model_dump(mode="json") if hasattr(default, "model_dump") else str(default)
        yield {"name": f"{prefix}{name}", "default": plain, "about": field.description or meanings.get(name)}


def _docstrings(section: "type[BaseModel]") -> dict[str, str]:
    """Return the texts that stand below the fields of a class, by field; none where its source is not here."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    body = getattr(tree, "body", [])
    return {
        field.target.id: text.value.value
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

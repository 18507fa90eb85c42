"""Demonstrating: the tokens of what a policy is shown before a conversation that it had without it.

Source: self-distillation from demonstrations (SDFT), arXiv 2601.19897: the policy that sees a demonstration teaches the
one that does not.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tasks.inference import model_info
from tasks.inference.engine import Engine
from tasks.inference.scoring import NotScorable, Served

if TYPE_CHECKING:
    from configs.algorithms import OpsdConfig
    from configs.sections import ModelConfig

Row = Mapping[str, Any]


class Demonstrating:
    """Makes what is shown, as a system message in the model's own format; the tokenizer is loaded once."""

    def __init__(self, settings: "OpsdConfig", model: "ModelConfig", at: Callable[[], Served]) -> None:
        self._settings = settings
        self._model = model
        self._at = at
        self._known: dict[str, list[int]] = {}

    def shown(self, trace: Row, tokens: Sequence[int]) -> list[int]:
        """Return tokens of a trace with what is shown before them; `trace` is a row of traces.

        What begins every conversation once stays in front of all and is not there a second time. Raises NotScorable
        where neither the trace's info nor its task holds a demonstration.
        """
        text = self._settings.template.replace("{demonstration}", demonstration(trace, self._settings.demonstration))
        if text not in self._known:
            self._known[text] = self._tokens(("system", text))
        begin = self._beginning if list(tokens[: len(self._beginning)]) == self._beginning else []
        return [*self._known[text], *tokens[len(begin) :]]

    @cached_property
    def _beginning(self) -> list[int]:
        """The tokens that a conversation begins with, whoever speaks first, and that it has nowhere else."""
        system, user, both = ("system", "x"), ("user", "x"), self._tokens(("system", "x"), ("user", "x"))
        found = []
        for one, other in zip(self._tokens(system), self._tokens(user), strict=False):
            if one != other or both.count(one) > 1:
                break
            found.append(one)
        return found

    def _tokens(self, *messages: tuple[str, str]) -> list[int]:
        rendered = self._renderer.render([{"role": role, "content": text} for role, text in messages])
        return list(rendered.token_ids)

    @cached_property
    def _renderer(self) -> Any:
        from renderers import create_renderer
        from renderers.base import load_tokenizer

        tokenizer = self._model.tokenizer or self._model.path or self._served_from()
        config = model_info.renderer_config(self._model.renderer, tokenizer, self._model.renderer_settings)
        return create_renderer(load_tokenizer(tokenizer), config)

    def _served_from(self) -> str:
        served = self._at()
        return Engine(served.url, served.api_key).model_directory()


def demonstration(trace: Row, field: str) -> str:
    """Return the demonstration of a trace: the field of what its environment noted, or else of the example's task.

    Text is taken as it is, other values as JSON. Raises NotScorable where there is none, or an empty one.
    """
    task = json.loads(trace["record"]).get("task", {})
    for place in (json.loads(trace["info"]), task.get("data", task)):
        value = place.get(field)
        if value not in (None, ""):
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    raise NotScorable(
        f"environment {trace['environment']}, example {trace['example_id']} (trace {trace['trace_id']}): neither its "
        f"info nor its task has a field {field!r} that holds a demonstration. Nothing was scored; the rows are safe. "
        "Name the field that does (algorithm.demonstration)"
    )

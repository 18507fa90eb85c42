"""Demonstrating: the tokens of what a policy is shown before a conversation that it had without it.

Source: self-distillation from demonstrations (SDFT), arXiv 2601.19897: the policy that sees a demonstration teaches the
one that does not.
"""

import json
from collections.abc import Callable, Mapping
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

    def prefix(self, trace: Row) -> list[int]:
        """Return the tokens to go before those of a trace; `trace` is a row of traces.

        Raises NotScorable where neither its info nor its task holds a demonstration.
        """
        text = self._settings.template.replace("{demonstration}", demonstration(trace, self._settings.demonstration))
        if text not in self._known:
            rendered = self._renderer.render([{"role": "system", "content": text}])
            self._known[text] = list(rendered.token_ids)
        return self._known[text]

    @cached_property
    def _renderer(self) -> Any:
        from renderers import config_from_name, create_renderer
        from renderers.base import load_tokenizer

        tokenizer = self._model.tokenizer or self._model.path or self._served_from()
        name = model_info.renderer_name(self._model.renderer, tokenizer)
        return create_renderer(load_tokenizer(tokenizer), config_from_name(name))

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

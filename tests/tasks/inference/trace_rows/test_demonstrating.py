"""What a policy is shown before its own tokens: in its renderer's words and settings, after what begins every chat."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.algorithms import OpsdConfig
from configs.sections import ModelConfig
from tasks.inference.engine.client import ServedModel
from tasks.inference.engine.model_info import ModelUnusable
from tasks.inference.trace_rows.demonstrations import DemonstrationPrompt
from tasks.learner.tiny import tiny_qwen3

pytestmark = pytest.mark.engine

LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
TRACE = {"record": json.dumps({"task": {"answer": "cba"}}), "info": "{}", "trace_id": "t0"}
SHOWN = "A correct answer, for guidance:\ncba"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate": 16}
    return tiny_qwen3(tmp_path_factory.mktemp("model"), words=LLAMA, **sizes)


def rendered(directory: Path, renderer: str, *messages: tuple[str, str]) -> tuple[Any, list[int]]:
    """The tokenizer, and the tokens of a conversation."""
    from renderers import config_from_name, create_renderer
    from renderers.base import load_tokenizer

    tokenizer = load_tokenizer(str(directory))
    chat = [{"role": role, "content": content} for role, content in messages]
    return tokenizer, list(create_renderer(tokenizer, config_from_name(renderer)).render(chat).token_ids)


def demonstrating(directory: Path, renderer: str, **settings: Any) -> DemonstrationPrompt:
    model = ModelConfig(path=str(directory), renderer=renderer, renderer_settings=settings)
    return DemonstrationPrompt(OpsdConfig(), model, lambda: ServedModel("http://nowhere", ""))


def test_what_is_shown_is_a_system_message_before_the_conversation(directory: Path) -> None:
    _, tokens = rendered(directory, "qwen3", ("system", "be short"), ("user", "abc"))
    tokenizer, prefix = rendered(directory, "qwen3", ("system", SHOWN))
    found = demonstrating(directory, "qwen3").prepend(TRACE, tokens)
    assert found == [*prefix, *tokens]
    assert tokenizer.decode(found).count("<|im_start|>") == 3, "what begins every message stays"


def test_what_begins_a_conversation_is_there_once(directory: Path) -> None:
    tokenizer, tokens = rendered(directory, "llama-3", ("user", "abc"))
    found = demonstrating(directory, "llama-3").prepend(TRACE, tokens)
    text = tokenizer.decode(found)
    assert text.startswith("<|begin_of_text|>") and text.count("<|begin_of_text|>") == 1 and SHOWN in text
    assert found[-len(tokens) + 1 :] == tokens[1:]
    assert demonstrating(directory, "llama-3").prepend(TRACE, tokens[1:])[-len(tokens) + 1 :] == tokens[1:]


def test_the_settings_of_the_renderer_count(directory: Path) -> None:
    shown = demonstrating(directory, "llama-3", date_string="01 Apr 2031").prepend(TRACE, [1, 2])
    tokenizer, _ = rendered(directory, "llama-3", ("user", "abc"))
    assert "01 Apr 2031" in tokenizer.decode(shown)
    with pytest.raises(ModelUnusable, match="refuses them"):
        demonstrating(directory, "qwen3", no_such_setting=1).prepend(TRACE, [1, 2])

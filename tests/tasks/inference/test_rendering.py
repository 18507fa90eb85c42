"""Demonstrations: exactly the renderer's tokens, and exactly what a policy samples is trained."""

from pathlib import Path
from typing import Any

import pytest

from tasks.inference.model_info import ModelUnusable
from tasks.inference.rendering import DemonstrationUnusable, demonstration
from tasks.learner.tiny import tiny_qwen3

pytestmark = pytest.mark.engine

ASKED = {"role": "user", "content": "Reverse: abc"}
ANSWERED = {"role": "assistant", "content": "<rev>cba</rev>"}
END = "<|im_end|>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"), hidden=16, layers=1, heads=2, kv_heads=2, intermediate=16)


def rendered(directory: Path, name: str, messages: list[dict[str, Any]], **choices: Any) -> tuple[Any, list[int]]:
    """The tokenizer, and what the renderer makes of the messages."""
    from renderers import config_from_name, create_renderer
    from renderers.base import load_tokenizer

    tokenizer = load_tokenizer(str(directory))
    return tokenizer, list(create_renderer(tokenizer, config_from_name(name)).render(messages, **choices).token_ids)


@pytest.mark.parametrize("name", ["qwen3", "default"])
def test_one_exchange(directory: Path, name: str) -> None:
    rows = demonstration([ASKED, ANSWERED], directory, name)
    tokenizer, whole = rendered(directory, name, [ASKED, ANSWERED])
    joined = [token for row in rows for token in row["token_ids"]]
    assert joined == whole[: len(joined)] and tokenizer.decode(whole[len(joined) :]) == "\n"
    _, prompt = rendered(directory, name, [ASKED], add_generation_prompt=True)
    mask = [flag for row in rows for flag in row["mask"]]
    assert joined[: len(prompt)] == prompt, "the policy is asked with these very tokens"
    assert mask == [False] * len(prompt) + [True] * (len(joined) - len(prompt))
    sampled = tokenizer.decode([token for token, own in zip(joined, mask, strict=True) if own])
    assert sampled.endswith(f"<rev>cba</rev>{END}")


@pytest.mark.parametrize("name", ["qwen3", "default"])
def test_every_assistant_turn_is_trained(directory: Path, name: str) -> None:
    messages = [
        {"role": "system", "content": "be short"},
        ASKED,
        ANSWERED,
        {"role": "user", "content": "more"},
        ANSWERED,
    ]
    rows = demonstration(messages, directory, name)
    tokenizer, whole = rendered(directory, name, messages)
    joined = [token for row in rows for token in row["token_ids"]]
    assert joined == whole[: len(joined)]
    assert [row["sampled"] for row in rows] == [False, False, True, False, True]
    for row in rows:
        own = tokenizer.decode([token for token, flag in zip(row["token_ids"], row["mask"], strict=True) if flag])
        assert own.endswith(f"<rev>cba</rev>{END}") if row["sampled"] else own == ""
    assert [row["parent"] for row in rows] == [None, 0, 1, 2, 3]
    assert all(len(row["token_ids"]) == len(row["mask"]) == len(row["logprobs"]) for row in rows)
    assert all(len(row["is_content"]) in (0, len(row["token_ids"])) for row in rows)


def test_a_demonstration_without_an_answer(directory: Path) -> None:
    with pytest.raises(DemonstrationUnusable, match=r"\['user'\]"):
        demonstration([ASKED], directory, "qwen3")
    with pytest.raises(DemonstrationUnusable):
        demonstration([], directory, "qwen3")


def test_no_silent_renderer(directory: Path) -> None:
    with pytest.raises(ModelUnusable, match="no renderer is known"):
        demonstration([ASKED, ANSWERED], directory, "")
    with pytest.raises(ModelUnusable, match="'qwen33' is not a renderer"):
        demonstration([ASKED, ANSWERED], directory, "qwen33")

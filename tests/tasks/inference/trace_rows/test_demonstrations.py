"""Demonstrations: exactly the renderer's tokens; what is trained, and what a policy is shown before its own tokens."""

import json
from types import SimpleNamespace

import pytest

from configs.algorithms import OpsdConfig
from configs.sections import ModelConfig
from tasks.inference.engine.model_info import ModelUnusable
from tasks.inference.trace_rows.demonstrations import (
    DemonstrationPrompt,
    DemonstrationRenderer,
    DemonstrationUnusable,
    demonstration_renderer,
)
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.flagged import flagged

pytestmark = pytest.mark.engine

ASKED = {"role": "user", "content": "Reverse: abc"}
ANSWERED = {"role": "assistant", "content": "<rev>cba</rev>"}
MORE = {"role": "user", "content": "more"}
END = "<|im_end|>"

SIZES = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate": 16}
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
TRACE = {"record": json.dumps({"task": {"answer": "cba"}}), "info": "{}", "trace_id": "t0"}
SHOWN = "A correct answer, for guidance:\ncba"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("model"), **SIZES)


def rendered(directory, name, messages, **choices):
    """The tokenizer, and what the renderer makes of the messages."""
    from renderers import config_from_name, create_renderer
    from renderers.base import load_tokenizer

    tokenizer = load_tokenizer(str(directory))
    return tokenizer, list(create_renderer(tokenizer, config_from_name(name)).render(messages, **choices).token_ids)


def joined(rows, column="token_ids"):
    """The values of all messages in a row."""
    return [value for row in rows for value in row[column]]


def chosen(tokenizer, row, column="mask"):
    """The text of the tokens of a message that have a flag."""
    return tokenizer.decode(flagged(row["token_ids"], row[column]))


@pytest.mark.parametrize("name", ["qwen3", "default"])
def test_one_exchange(directory, name):
    rows = demonstration_renderer(directory, name)([ASKED, ANSWERED])
    tokenizer, whole = rendered(directory, name, [ASKED, ANSWERED])
    tokens, mask = joined(rows), joined(rows, "mask")
    assert tokens == whole[: len(tokens)] and tokenizer.decode(whole[len(tokens) :]) == "\n"
    _, prompt = rendered(directory, name, [ASKED], add_generation_prompt=True)
    assert tokens[: len(prompt)] == prompt, "the policy is asked with these very tokens"
    assert mask == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))
    assert tokenizer.decode(flagged(tokens, mask)).endswith(f"<rev>cba</rev>{END}")


@pytest.mark.parametrize("name", ["qwen3", "default"])
def test_every_assistant_turn_is_trained(directory, name):
    messages = [{"role": "system", "content": "be short"}, ASKED, ANSWERED, MORE, ANSWERED]
    rows = demonstration_renderer(directory, name)(messages)
    tokenizer, whole = rendered(directory, name, messages)
    tokens = joined(rows)
    assert tokens == whole[: len(tokens)]
    assert [row["sampled"] for row in rows] == [False, False, True, False, True]
    for row in rows:
        text = chosen(tokenizer, row)
        assert text.endswith(f"<rev>cba</rev>{END}") if row["sampled"] else text == ""
    assert [row["parent"] for row in rows] == [None, 0, 1, 2, 3]
    assert all(len(row["token_ids"]) == len(row["mask"]) == len(row["logprobs"]) for row in rows)
    assert all(len(row["is_content"]) in (0, len(row["token_ids"])) for row in rows)


def test_a_demonstration_without_an_answer(directory):
    render = demonstration_renderer(directory, "qwen3")
    with pytest.raises(DemonstrationUnusable, match=r"\['user'\]"):
        render([ASKED])
    with pytest.raises(DemonstrationUnusable):
        render([])


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/x.png", "file:///etc/passwd", "/etc/passwd", "x.png"])
@pytest.mark.parametrize(
    "part",
    [
        lambda address: {"type": "image_url", "image_url": {"url": address}},
        lambda address: {"type": "image_url", "image_url": address},
        lambda address: {"type": "image", "path": address},
        lambda address: {"image": address},
        lambda address: {"type": "video", "url": address},
    ],
)
def test_nothing_is_loaded_from_where_a_message_says(address, part):
    """Renderers of models that see open any address, and any file: they are not asked."""
    asked = []
    renderer = SimpleNamespace(render=lambda messages, **_: asked.append(messages))
    shown = {"role": "user", "content": [{"type": "text", "text": "http://x"}, part(address)]}
    with pytest.raises(DemonstrationUnusable, match=r"message 0: .* Nothing is loaded from elsewhere"):
        DemonstrationRenderer(renderer)([shown, ANSWERED])
    assert asked == []
    shown["content"] = [{"type": "text", "text": address}, part("data:image/png;base64,AAAA")]
    with pytest.raises(AttributeError, match="token_ids"):  # what was asked for is nothing
        DemonstrationRenderer(renderer)([shown, ANSWERED])
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("media", "expected"), [({}, '[{"type": "text", "text": "é"}]'), ({"image": "data:image/png;base64,AAAA"}, "é")]
)
def test_parts_are_kept_as_json_unless_one_is_an_image(media, expected):
    rendered = SimpleNamespace(
        token_ids=[1, 2], sampled_mask=[False, True], is_content=[], message_token_spans=lambda: [(0, 1), (1, 2)]
    )
    renderer = SimpleNamespace(render=lambda *_, **__: rendered, get_stop_token_ids=lambda: [2])
    shown = {"role": "user", "content": [{"type": "text", "text": "é", **media}]}
    assert [row["content"] for row in DemonstrationRenderer(renderer)([shown, ANSWERED])] == [
        expected,
        ANSWERED["content"],
    ]


@pytest.mark.essential
def test_no_silent_renderer(directory):
    with pytest.raises(ModelUnusable, match="no renderer is known"):
        demonstration_renderer(directory, "")([ASKED, ANSWERED])
    with pytest.raises(ModelUnusable, match="'qwen33' is not a renderer"):
        demonstration_renderer(directory, "qwen33")([ASKED, ANSWERED])


TOOL = {"type": "function", "function": {"name": "find", "description": "", "parameters": {"type": "object"}}}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}],
}
FOUND = {"role": "tool", "tool_call_id": "c0", "name": "find", "content": "it"}
NO_THOUGHT = {"enable_thinking": False}


@pytest.mark.parametrize("settings", [{}, NO_THOUGHT])
def test_calls_of_tools_are_trained_and_results_are_not(directory, settings):
    rows = demonstration_renderer(directory, "qwen3", settings)([ASKED, CALLING, FOUND, ANSWERED], [TOOL])
    tokenizer, _ = rendered(directory, "qwen3", [ASKED])
    text = [tokenizer.decode(row["token_ids"]) for row in rows]
    assert "<tools>" in text[0] and '"name": "find"' in text[0]
    assert [row["role"] for row in rows] == ["user", "assistant", "tool", "assistant"]
    call, result = rows[1:3]
    assert chosen(tokenizer, call) == f'<tool_call>\n{{"name": "find", "arguments": {{"a": 1}}}}\n</tool_call>{END}'
    assert chosen(tokenizer, result, "is_content") == "it" and not any(result["mask"])


def test_an_empty_thought_that_every_prompt_ends_with_is_not_sampled(directory):
    rows = demonstration_renderer(directory, "qwen3", NO_THOUGHT)([ASKED, ANSWERED, MORE, ANSWERED])
    tokenizer, _ = rendered(directory, "qwen3", [ASKED])
    for row in (rows[1], rows[3]):
        fed = tokenizer.decode(flagged(row["token_ids"], [not flag for flag in row["mask"]]))
        assert fed.startswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert chosen(tokenizer, row) == f"<rev>cba</rev>{END}"


def test_a_setting_that_the_renderer_does_not_have(directory):
    with pytest.raises(ModelUnusable, match=r"renderer qwen3 refuses them: .*\n.*add_vision_id"):
        demonstration_renderer(directory, "qwen3", {"add_vision_id": True})
    with pytest.raises(ModelUnusable, match="name the renderer"):
        demonstration_renderer(directory, "auto", NO_THOUGHT)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("model"), words=LLAMA, **SIZES)


def prompt_of(llama, renderer, **settings):
    model = ModelConfig(path=str(llama), renderer=renderer, renderer_settings=settings)
    return DemonstrationPrompt(OpsdConfig(), model)


def test_what_is_shown_is_a_system_message_before_the_conversation(llama):
    _, tokens = rendered(llama, "qwen3", [{"role": "system", "content": "be short"}, MORE])
    tokenizer, prefix = rendered(llama, "qwen3", [{"role": "system", "content": SHOWN}])
    found = prompt_of(llama, "qwen3").prepend(TRACE, tokens)
    assert found == [*prefix, *tokens]
    assert tokenizer.decode(found).count("<|im_start|>") == 3, "what begins every message stays"


def test_what_begins_a_conversation_is_there_once(llama):
    tokenizer, tokens = rendered(llama, "llama-3", [MORE])
    found = prompt_of(llama, "llama-3").prepend(TRACE, tokens)
    text = tokenizer.decode(found)
    assert text.startswith("<|begin_of_text|>") and text.count("<|begin_of_text|>") == 1 and SHOWN in text
    assert found[-len(tokens) + 1 :] == tokens[1:]
    assert prompt_of(llama, "llama-3").prepend(TRACE, tokens[1:])[-len(tokens) + 1 :] == tokens[1:]


def test_the_settings_of_the_renderer_count(llama):
    shown = prompt_of(llama, "llama-3", date_string="01 Apr 2031").prepend(TRACE, [1, 2])
    tokenizer, _ = rendered(llama, "llama-3", [MORE])
    assert "01 Apr 2031" in tokenizer.decode(shown)
    with pytest.raises(ModelUnusable, match="refuses them"):
        prompt_of(llama, "qwen3", no_such_setting=1).prepend(TRACE, [1, 2])


def test_a_reply_is_what_follows_its_prompt_and_is_read_as_it_was_said(directory):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    reply = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [call]}
    prompt, completion = demonstration_renderer(directory, "qwen3").reply([ASKED], reply, None)
    tokenizer, whole = rendered(directory, "qwen3", [ASKED, reply])
    assert [*prompt.token_ids, *completion] == whole[: len(prompt.token_ids) + len(completion)]
    assert tokenizer.decode(completion).startswith("<think>\nhm\n</think>\n\nso\n<tool_call>\n{")
    with pytest.raises(DemonstrationUnusable, match="writes the prompt differently once the reply follows"):
        demonstration_renderer(directory, "qwen3", {"enable_thinking": False}).reply([ASKED], reply, None)

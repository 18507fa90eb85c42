"""What is looked at of a model before anything starts: its weights' headers, its tokenizer, the length of texts."""

import json

import pytest

from tasks.inference.engine.model_info import ModelUnusable, count_tokens, require_tokenizer
from tasks.inference.engine.weights_view import require_weights
from tests.fixtures import builders
from tests.fixtures.wrong_configs import characters


@pytest.fixture
def model(tmp_path):
    return builders.model(tmp_path / "model", tokenizer=characters())


def test_a_whole_model_is_taken(model):
    require_weights(model)
    require_tokenizer(model, "qwen3")


@pytest.mark.parametrize("missing", [1, 100])
def test_weights_that_are_cut_short_are_named_with_their_own_path(model, missing):
    file = model / "model.safetensors"
    file.write_bytes(builders.safetensors(b"w" * 200)[:-missing])
    with pytest.raises(ModelUnusable, match=f"{file} has .* bytes") as refused:
        require_weights(model)
    assert "again" in str(refused.value)


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_of_its_own_is_enough_for_the_default_renderer(model, place):
    with pytest.raises(ModelUnusable, match=r"no chat template.*model\.renderer"):
        require_tokenizer(model, "default")
    (model / place).write_text(json.dumps({"chat_template": "{{ messages }}"}))
    require_tokenizer(model, "default")


def test_texts_are_counted_in_tokens(model, tmp_path):
    assert count_tokens(model, ["abc", "", "ab\ncd"]) == [3, 0, 5]
    assert count_tokens(tmp_path, ["abc"]) is None

"""The renderer of a local model directory: recognised by its type and by what its chat template writes."""

import json

import pytest

from tasks.inference.engine.model_info import ModelUnusable, recognised_renderer, renderer_name
from tasks.learner.tiny import tiny_qwen3

pytestmark = pytest.mark.engine

TEMPLATE = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
{{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, ' }}
{{- '"arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""What the template of Qwen3 writes of conversations without calls and thoughts."""


def model(directory, template):
    tiny_qwen3(directory, hidden=16, layers=1, heads=2, kv_heads=2, intermediate=16)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def test_a_directory_of_a_known_type_and_template_has_its_renderer(tmp_path):
    directory = model(tmp_path / "mymodel", TEMPLATE)
    assert renderer_name("", "mymodel", directory) == "qwen3"
    assert renderer_name("default", "mymodel", directory) == "default", "a name that is given is taken"


def test_another_template_or_type_is_not_taken_for_it(tmp_path):
    directory = model(tmp_path / "mymodel", TEMPLATE.replace("You may call", "Call"))
    with pytest.raises(ModelUnusable, match="no renderer is known for 'mymodel', nor recognised by its model_type"):
        renderer_name("", "mymodel", directory)
    strange = model(tmp_path / "strange", TEMPLATE)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"model_type": "of nobody"}))
    assert recognised_renderer(strange) == recognised_renderer(tmp_path / "nowhere") == ""

"""Examples whose first prompt is too long: left out or refused, counted as the renderer writes them, and in keys."""

import json

import pytest

from configs.checks.environments import environment_problems
from configs.environments import EnvironmentConfig
from configs.run import RunConfig, View
from configs.sections import ModelConfig
from flows.runtime.preflight import environment_findings
from tasks.assignment.examples import STAGE
from tasks.inference.environments.introspection import EnvironmentFacts
from tasks.inference.environments.packages import EnvironmentUnavailable
from tasks.inference.environments.prompt_limits import limit_prompts
from tasks.inference.environments.servers import LoadedEnvironment
from tasks.inference.trace_rows.demonstrations import load_renderer
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.builders import example, table

pytestmark = pytest.mark.engine

PROMPTS = ["short", "x" * 200, [{"role": "user", "content": "y" * 100}], None]
SYSTEM = {"prompt": "z", "system_prompt": "s" * 200}
PICTURE = {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("model"), hidden=16, layers=1, heads=2, kv_heads=2, intermediate=16)


def limited(directory, limit, **settings):
    """Return an environment of six examples, without those whose prompts are too long."""
    tasks = [{"prompt": prompt} for prompt in PROMPTS] + [SYSTEM, PICTURE]
    rows = [
        example(f"e{number}", "game", "eval" if number % 2 else "train") | {"task": json.dumps(task)}
        for number, task in enumerate(tasks)
    ]
    environment = EnvironmentConfig(name="game", taskset={"id": "game"}, max_prompt_tokens=limit, **settings)
    own = LoadedEnvironment(table("examples", rows), EnvironmentFacts({"agent": True}, True))
    model = ModelConfig(path=str(directory), renderer="qwen3" if directory else "")
    return limit_prompts(environment, own, model)


def ids(loaded):
    return loaded.examples["example_id"].to_pylist()


def test_examples_with_longer_prompts_are_left_out(directory):
    written = load_renderer(str(directory), "qwen3", {}).render_ids(
        [{"role": "user", "content": "y" * 100}], add_generation_prompt=True
    )
    for limit, kept in ((len(written), ["e0", "e2", "e3", "e5"]), (len(written) - 1, ["e0", "e3", "e5"])):
        loaded = limited(directory, limit)
        assert ids(loaded) == kept and len(loaded.long_prompts) == 6 - len(kept)
    assert ids(limited(directory, None)) == [f"e{number}" for number in range(6)]


def test_longer_prompts_stop_a_run_that_asks_for_it(directory):
    with pytest.raises(EnvironmentUnavailable, match=r"max_prompt_tokens is 60, and 3 of 6 examples .* \"drop\""):
        limited(directory, 60, long_prompts="error")
    assert len(ids(limited(directory, 9999, long_prompts="error"))) == 6
    with pytest.raises(EnvironmentUnavailable, match=r"no model is named whose tokenizer counts"):
        limited("", 60)


def test_the_plan_says_how_many_are_left_out(directory):
    section = {"name": "game", "taskset": {"id": "game"}, "max_prompt_tokens": 60}
    config = RunConfig.model_validate(
        {"seed": 1, "environments": [section], "model": {"path": str(directory)}, "evaluation": {"num_examples": 1}}
    )
    notes = [text for _, text in environment_findings(config, {"game": limited(directory, 60)}, lambda texts: None)]
    said = "environments.0.max_prompt_tokens: 3 of 6 examples are left out"
    assert [note.startswith(said) for note in notes].count(True) == 1


def test_a_limit_is_in_keys_with_the_tokenizer_and_none_leaves_no_trace():
    def key(model, **settings):
        section = {"name": "game", "taskset": {"id": "game"}, **settings}
        config = RunConfig.model_validate({"environments": [section], "model": model})
        return View(config, STAGE.sections, STAGE.name).content()

    one, two = {"tokenizer_digest": "1"}, {"tokenizer_digest": "2"}
    assert key(one) == key(two) and "max_prompt_tokens" not in str(key(one)) and "prompt_limits" not in key(one)
    assert key(one, max_prompt_tokens=60) != key(two, max_prompt_tokens=60) != key(two, max_prompt_tokens=61)


def test_a_policy_without_a_limit_is_refused():
    section = {"name": "game", "taskset": {"id": "game"}, "long_prompts": "error"}
    (line,) = environment_problems(RunConfig.model_validate({"environments": [section]}))
    assert line == (
        "environments.0.long_prompts: no prompt is too long without a limit; set environments.0.max_prompt_tokens"
    )

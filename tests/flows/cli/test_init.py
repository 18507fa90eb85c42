"""Projects that `stagecoach init` makes: of own data, for an environment, out of another trainer's config."""

import importlib
import importlib.util
import json
import re
import sys
import tomllib
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.load import load
from flows import cli
from flows.cli import demo
from flows.cli.project import CONFIG, EXAMPLES, NUM_EXAMPLES, REWARD, example_rows
from flows.runtime import demo_sources
from flows.runtime.demo_sources import DEMO, demo_recipe, demo_weights
from flows.runtime.resolve_run import resolve_run
from storage.policies.store import Policies
from tests.fixtures.terminals import Terminal

ROOT = Path(__file__).parents[3]
PRIME_RL = """
max_steps = 12
[orchestrator]
batch_size = 32
group_size = 8
token_batch_siz = 3
[[orchestrator.train.source]]
env = { taskset = { id = "no-such-game" } }
[[orchestrator.train.source]]
env = { taskset = { id = "primeintellect/reverse-text@1.0" } }
[[orchestrator.eval.source]]
env = { taskset = { id = "reverse-text", length = 9 } }
[trainer.optim]
lr = 1e-5
[slurm]
partition = "all"
"""


TABLE = "question,solution\nWhat is 2+2?,4\nWhat is 3+3?,6\n"


def files(directory):
    """Return the files of a directory, by name."""
    return {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}


def made(directory, *options):
    """Make a project and return its files."""
    assert cli.main(["init", str(directory), *options]) == 0
    return files(directory)


def reward_of(text):
    """Return the reward function of a project."""
    module = {}
    exec(compile(text, REWARD, "exec"), module)
    return module["reward"]


def test_a_project_of_own_data(tmp_path, capsys, monkeypatch):
    directory = tmp_path / "new" / "project"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(isatty=lambda: True)
    )  # a question, which no file calls for, fails
    project = made(directory)
    assert list(project) and set(project) == {CONFIG, REWARD, EXAMPLES}
    config = load([directory / CONFIG])
    assert config.model.path == DEMO and config.environments[0].taskset["path"] == EXAMPLES
    assert len(project[REWARD].splitlines()) <= 12 and len(project[EXAMPLES].splitlines()) == NUM_EXAMPLES
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in said[2:]] == [["cd", str(directory)]] + [
        ["stagecoach", name] for name in ("check", "run", "view")
    ]


@pytest.mark.engine
@pytest.mark.essential
def test_a_project_of_somebody_s_file_shows_prompts_as_the_model_sees_them(tmp_path, capsys, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.csv").write_text(TABLE)
    for options, words in (
        (
            "--data q.csv --prompt questio",
            "q.csv, line 2: there is no column 'questio'; it has question, solution; did you",
        ),
        ("--data r.csv", "r.csv: there is no such file"),
        ("--data questions", "questions: there is no such file"),
        ("--data q.csv --environment own_data", "give one of them"),
        ("--prompt question", "--prompt and --answer are columns of --data"),
    ):
        status, message = call("init", "new", *options.split())
        assert status == 2 and words in message and not (tmp_path / "new").exists()
    project = made(tmp_path / "new", "--data", "q.csv", "--prompt", "question", "--answer", "solution")
    said = capsys.readouterr().out
    assert set(project) == {CONFIG, REWARD}
    assert "\n  <|im_start|>user\n  What is 2+2?<|im_end|>\n  <|im_start|>assistant\n" in said
    taskset = load([tmp_path / "new" / CONFIG]).environments[0].taskset
    assert taskset["path"] == str(tmp_path / "q.csv") and taskset["answer_column"] == "solution"


@pytest.mark.engine
def test_on_a_terminal_it_asks_for_file_and_columns(tmp_path, monkeypatch):
    (tmp_path / "q.csv").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    with Terminal("init", "new", PYTHONPATH=str(ROOT)) as terminal:
        terminal.type("q.csv\nquestion\nsolution\n")
        said = "".join(terminal.lines())
    assert "File with your examples, of q.csv" in said and "<|im_start|>user" in said
    taskset = load([tmp_path / "new" / CONFIG]).environments[0].taskset
    assert (taskset["prompt_column"], taskset["answer_column"]) == ("question", "solution")


def test_prompts_and_chat_format_are_those_of_the_warm_up_of_the_demo_s_model(tmp_path):
    # In another form the small model has never been asked, and answers at random.
    recipe = demo_recipe()
    prompt = importlib.import_module(f"{recipe.demonstrations[0].split()[0]}.texts").prompt
    assert all(row["prompt"] == prompt(row["answer"][::-1]) for row in example_rows())
    warm_up = load(["sft_demo"], [*recipe.warm_up, "model.path=x", "data.path=y"]).model
    made(tmp_path / "project")
    (tutorial,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/tutorial.md").read_text(), re.DOTALL)
    (tmp_path / "tutorial.toml").write_text(tutorial)
    for path in (tmp_path / "project" / CONFIG, tmp_path / "tutorial.toml"):
        model = load([path]).model
        assert (model.renderer, model.renderer_settings) == (warm_up.renderer, warm_up.renderer_settings)
    assert warm_up.renderer_settings == {"enable_thinking": False}


def test_what_cannot_be_made_is_refused_and_nothing_is_written(tmp_path, call):
    (tmp_path / REWARD).write_text("mine")
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / CONFIG).symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    for place, options, words in (
        ("", [], f"{REWARD} already, and files are never overwritten"),
        ("dangling", [], f"{CONFIG} already"),
        (REWARD, [], "cannot be written"),
        ("x", ["--environment", "own_dato"], "not installed"),
    ):
        status, message = call("init", str(tmp_path / place), *options)
        assert status == 2 and words in message
    assert "own_data" in message.replace("own_dato", "")
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / REWARD).read_text() == "mine"


def test_a_config_of_prime_rl(tmp_path, capsys):
    (tmp_path / "rl.toml").write_text(PRIME_RL)
    project = made(tmp_path / "new", "--from", str(tmp_path / "rl.toml"))
    config = load([tmp_path / "new" / CONFIG])
    assert set(project) == {CONFIG} and (config.steps, config.assignment.groups_per_step) == (12, 4)
    tasksets = [each.taskset["id"] for each in (*config.environments, *config.evaluation.environments)]
    assert tasksets == ["no-such-game", "sample_reverse_text", "sample_reverse_text"]
    said = capsys.readouterr().out
    carried, rest = said.split("\nchanged: ")
    changed, lost = rest.split("\nlost: 3, see docs/coming-from-prime-rl.md\n")
    assert "trainer.optim.lr = 1e-05 -> training.learning_rate\n" in carried
    assert 'orchestrator.eval.source.0.env.taskset.id = "reverse-text" -> ' in changed
    assert '-> environments.1.taskset.id = "sample_reverse_text"' in changed
    assert "slurm.partition" in lost and "orchestrator.token_batch_siz" in lost
    assert "taskset 'no-such-game' is not installed" in lost


def test_a_launch_line_of_verl_gets_a_reward_function_and_a_config_that_loads(tmp_path, capsys):
    keys = "data.train_files=a.parquet data.val_files=b.parquet trainer.test_freq=5 actor_rollout_ref.rollout.n=4"
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {keys}\n")
    project = made(tmp_path / "new", "--from", str(tmp_path / "run.sh"))
    config = load([tmp_path / "new" / CONFIG])
    (evaluated,) = config.evaluation.environments
    assert set(project) == {CONFIG, REWARD} and config.environments[0].taskset["path"] == "a.parquet"
    assert (evaluated.taskset["path"], config.evaluation.every) == ("b.parquet", 5)
    assert "lost: 0, see docs/coming-from-verl.md" in capsys.readouterr().out


def test_arguments_of_trl_get_a_reward_function_beside_them(tmp_path, capsys):
    arguments = {"model_name_or_path": "Qwen/Qwen3-0.6B", "max_steps": 3, "reward_funcs": "mine", "dataset_name": "a/b"}
    (tmp_path / "grpo.json").write_text(json.dumps(arguments))
    project = made(tmp_path / "new", "--from", str(tmp_path / "grpo.json"))
    assert set(project) == {CONFIG, REWARD}
    assert tomllib.loads(project[CONFIG])["environments"][0]["taskset"]["hub"] == "a/b"
    assert load([tmp_path / "new" / CONFIG]).model.path == "Qwen/Qwen3-0.6B"
    said = capsys.readouterr().out
    assert "reward_funcs" in said.split("\nlost: ")[1]
    reward = reward_of(project[REWARD])
    assert (reward("it is 4", "4", {}), reward("it is 5", "4", {})) == (1.0, 0.0)


def test_weights_of_rewards_of_trl_are_those_of_functions_beside_the_config(tmp_path):
    (tmp_path / "grpo.json").write_text('{"reward_weights": [1.0, 0.2], "reward_funcs": ["right", "short"]}')
    project = made(tmp_path / "new", "--from", str(tmp_path / "grpo.json"))
    (environment,) = load([tmp_path / "new" / CONFIG]).environments
    assert environment.taskset["path"] in project and environment.taskset["task"]["scoring"]["short"]["weight"] == 0.2
    assert "def right(reply" in project[REWARD] and "def short(reply" in project[REWARD]


def test_a_project_for_an_installed_environment(tmp_path):
    package = demo_recipe("kuhn_poker").demonstrations[0].split()[0]
    text = made(tmp_path, "--environment", package)[CONFIG]
    config = load([tmp_path / CONFIG])
    assert config.environments[0].taskset == {"id": package} and config.environments[0].name == package
    assert '# type = "rae"' in text


def demo_config(*overrides):
    """Return the config of a run whose model is the demo's."""
    return load(["demo"], [f"model.path={DEMO}", *overrides])


def test_the_model_demo_is_made_before_a_run_and_other_models_are_left_alone(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(demo_sources, "warmed_weights", lambda root, sft: asked.append(root) or "/weights")
    assert demo_weights(load(["demo"], ["model.path=elsewhere"]), print) == ""
    assert demo_weights(demo_config("kind=evaluate", "evaluation.policy=first"), print) == "" and asked == []
    store = str(tmp_path / "store")
    assert demo_weights(demo_config(f"store={store}"), print) == "/weights" and asked == [store]


def test_the_command_line_warms_the_model_up_as_flows_do_and_says_so(tmp_path, monkeypatch, capsys):
    made(tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    started = []
    monkeypatch.setattr(demo_sources, "build", lambda *_: None)
    monkeypatch.setattr(Policies, "directory", lambda policies, key: Path("/weights"))
    monkeypatch.setattr(
        demo, "resolve_run", lambda *given, **named: signature(resolve_run).bind(*given, **named).arguments
    )

    def run(config):
        started.append(config)
        return {"policy": {"key": "key"}}

    assert demo.demo_model("train", [CONFIG], [], "", run) == ["model.path=/weights"]
    assert [(each["kind"], each["settings"]["name"]) for each in started] == [("sft", "demo-warm-up")]
    assert started[0]["overrides"] == demo_recipe().warm_up
    assert "The run demo-warm-up" in (printed := capsys.readouterr().out) and "later runs find it" in printed


def test_an_environment_that_is_not_there_is_refused_before_the_warm_up(monkeypatch):
    monkeypatch.setattr(demo_sources, "warmed_weights", pytest.fail)
    with pytest.raises(ValueError, match="no_such_taskset"):
        demo_weights(demo_config("environments.0.taskset.id=no_such_taskset"), print)


def test_what_a_config_says_cannot_leave_its_comment(tmp_path):
    text = '[orchestrator]\nbatch_size = 8\n[orchestrator.renderer]\nname = "qwen3"\n"a\\nsteps = 9\\n#" = true\n'
    (tmp_path / "rl.toml").write_text(text)
    made(tmp_path / "new", "--from", str(tmp_path / "rl.toml"))
    assert "steps" not in tomllib.loads((tmp_path / "new" / CONFIG).read_text())

"""README and the tutorial pages, typed from top to bottom with the installed wheel: each command succeeds.

A page has an empty directory. `stagecoach view` is opened, asked for its page and ended by Ctrl-C.
"""

import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.fixtures.documents import PAGES, steps
from tests.fixtures.installed import Installed, build_wheel, install_wheel, variables

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PUBLISHED = Path(__file__).parents[1] / "fixtures/published"
GRPO = "learning_rate: 1.0e-6\nnum_generations: 8\nmax_steps: 5\n"
INFERENCE = '[vllm]\nmodel = "Qwen/Qwen3-0.6B"\nmax_model_len = 4096\n'
READERS_FILES: Mapping[str, Mapping[str, str | Path]] = {
    "docs/first-project.md": {"my-project/rl.toml": PUBLISHED / "alphabet_sort_lora.toml"},
    "docs/coming-from-prime-rl.md": {
        "rl.toml": PUBLISHED / "alphabet_sort_lora.toml",
        "orchestrator.toml": PUBLISHED / "orch.toml",
        "trainer.toml": PUBLISHED / "train.toml",
        "inference.toml": INFERENCE,
    },
    "docs/coming-from-trl.md": {
        "grpo.yaml": GRPO,
        "train.py": "GRPOTrainer('Qwen/Qwen3-0.6B', args=GRPOConfig(num_generations=8))\n",
    },
    "docs/coming-from-verl.md": {"run.sh": "python3 -m verl.trainer.main_ppo data.train_files=a.parquet\n"},
    "docs/coming-from-openrlhf.md": {"train.sh": "python3 -m openrlhf.cli.train_ppo_ray --data.prompt_dataset a/b\n"},
}
"""Files that a reader of the page brings."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel of this checkout, built and installed once."""
    directory = tmp_path_factory.mktemp("documents")
    wheel = build_wheel(directory)
    return Installed(wheel, install_wheel(wheel, directory / "environment"), directory)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work(page, installed, tmp_path):
    for name, content in READERS_FILES.get(page, {}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else content.read_text())
    here = replace(installed, directory=tmp_path)
    for step in steps(page):
        if step.reason:
            print(f"not run: {step.text!r}: {step.reason}")
        elif step.file:
            (here.directory / step.file).write_text(step.text, encoding="utf-8")
        elif step.words[0] == "cd":
            here = replace(here, directory=here.directory / step.words[1])
        elif step.words[:2] == ["stagecoach", "view"] and "--save" not in step.words:
            look_at(here, step)
        else:
            done = here.run("bash", "-c", step.text, timeout=1800.0)
            assert done.returncode == 0, f"{step.text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def look_at(installed, step):
    """Serve the viewer, read the page that it names, and end it as Ctrl-C does."""
    environment = variables() | installed.environment | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        step.words,
        cwd=installed.directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"http://\S+", line)
        try:
            assert match, line + process.stdout.read()
            assert urlopen(match[0], timeout=60).status == 200
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 130


def test_the_reasons_are_few():
    reasons = {(step.page, step.reason) for page in PAGES for step in steps(page) if step.reason}
    assert {page for page, _ in reasons} <= {"README.md", "docs/prefect.md", "docs/python.md", "docs/viewing.md"}
    assert any(step.file == "rewards.py" for step in steps("docs/tutorial.md"))

"""The first hour of a new user, command by command, with this checkout: mistakes and configs of other trainers too.

tests/acceptance/test_documents.py types what the pages say, with the installed wheel.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.fixtures.warming import warmed

ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, "-m", "flows.cli")
SMALL = ("steps=2", "seed=1", "evaluation.every=0")
PUBLISHED = ROOT / "tests/fixtures/published"
FROM = {
    "moved": "alphabet_sort_lora.toml",
    "parts": "orch.toml train.toml",
    "supervised": "refused_sft.toml",
    "from-trl": "gspo.sh",
}
"""Configs that prime-rl and TRL publish, by the project that is made of them."""
MORE = {
    "seats": "two_seats_rae.toml",
    "mixed": "mixed_grpo_opd.toml",
    "cluster": "intellect_3.toml",
    "judged": "search_judges.toml",
    "images": "color_codeword.toml",
    "evals": "refused_evals.toml",
    "serving": "refused_inference.toml",
}
"""Further ones."""


class Answer(NamedTuple):
    """What a command printed, and its exit status."""

    status: int
    text: str


class FirstHour:
    """The commands of the hour, typed in a directory, and what they answered."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.project = directory / "my-project"
        self.answers: dict[str, Answer] = {}

    def play(self) -> None:
        """Type all of it but `translate(MORE)`; `answers` has what was printed, by command.

        The model is one that was made in seconds, in place of the minutes of the model `demo`.
        """
        warmed(self.directory / "model", {}, num_updates=100)
        self.type("init my-project", self.directory)
        self.type("check config.toml")
        self.type("run config.toml training.learning_rat=1e-5")
        self.type(f"run config.toml --name first --plain model.path=../model {' '.join(SMALL)}")
        self.type("runs")
        self.type("show first")
        self.type("view --save /runs/first run.html")
        reward = self.project / "my_reward.py"
        reward.write_text(reward.read_text().replace("else 0.0", "else -0.1"))
        self.type(f"run config.toml --name first --plain model.path=../model {' '.join(SMALL)} steps=3", label="edited")
        self.translate(FROM)
        for name in ("moved", "from-trl"):
            self.type("check config.toml", self.directory / name, label=f"check {name}")

    def translate(self, configs: Mapping[str, str]) -> None:
        """Make a project of the files of each config, by the project's name."""
        for name, files in configs.items():
            paths = " ".join(str(PUBLISHED / file) for file in files.split())
            self.type(f"init {name} --from {paths}", self.directory, label=f"init {name}")

    def type(self, line: str, where: Path | None = None, label: str = "") -> None:
        """Run one command in the project, or elsewhere, and keep what it answered under its first word or two."""
        done = subprocess.run(
            [*PROGRAM, *line.split()],
            cwd=where or self.project,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        self.answers[label or line] = Answer(done.returncode, done.stdout)

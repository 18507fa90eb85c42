"""The first hour of a new user, command by command: `python -m tests.acceptance.first_hour DIRECTORY [PROGRAM ...]`.

PROGRAM is how the command line is called, for example the `stagecoach` of a wheel; without it, this checkout's. What
an hour with the installed wheel has besides (installing it, the notebook) belongs before and after `play`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.fixtures.installed import variables
from tests.fixtures.warming import warmed

ROOT = Path(__file__).parents[2]
CHECKOUT = (sys.executable, "-m", "flows.cli")
SMALL = ("steps=2", "seed=1", "evaluation.every=0")
RL_TOML = """
max_steps = 5
[model]
name = "Qwen/Qwen3-0.6B"
[orchestrator]
batch_size = 32
group_size = 8
[[orchestrator.train.source]]
env = { taskset = { id = "own_data", path = "../my-project/examples.jsonl" } }
[trainer.optim]
lr = 1e-5
[slurm]
partition = "all"
"""
SCRIPT = """
config = GRPOConfig(learning_rate=1e-5, max_steps=5, num_generations=4, beta=0.04)
GRPOTrainer(model="Qwen/Qwen3-0.6B", args=config, reward_funcs=[mine])
"""


class Answer(NamedTuple):
    """What a command printed, and its exit status."""

    status: int
    text: str


class FirstHour:
    """The commands of the hour, typed in a directory, and what they answered."""

    def __init__(self, directory: Path, program: Sequence[str] = CHECKOUT) -> None:
        self.directory = directory
        self.project = directory / "my-project"
        self.answers: dict[str, Answer] = {}
        self._program = program

    def play(self) -> dict[str, Answer]:
        """Type all of it and return the answers by command.

        The model is one that was made in seconds, in place of the minutes of the model `demo`.
        """
        warmed(self.directory / "model", {}, num_updates=100)
        (self.directory / "rl.toml").write_text(RL_TOML)
        (self.directory / "grpo.py").write_text(SCRIPT)
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
        self.type("init moved --from rl.toml", self.directory)
        self.type("check config.toml", self.directory / "moved", label="check moved")
        self.type("init from-trl --from grpo.py", self.directory)
        self.type("check config.toml", self.directory / "from-trl", label="check from-trl")
        return self.answers

    def type(self, line: str, where: Path | None = None, label: str = "") -> None:
        """Run one command in the project, or elsewhere, and keep what it answered under its first word or two."""
        given = os.environ | {"PYTHONPATH": str(ROOT)} if self._program == CHECKOUT else variables()
        done = subprocess.run(
            [*self._program, *line.split()],
            cwd=where or self.project,
            env=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        self.answers[label or line] = Answer(done.returncode, done.stdout)


if __name__ == "__main__":
    hour = FirstHour(Path(sys.argv[1]).resolve(), sys.argv[2:] or CHECKOUT)
    print(json.dumps(hour.play(), indent=1))

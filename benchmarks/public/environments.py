"""Tries packages of others: `python -m benchmarks.public.environments DIRECTORY BATCH`.

A batch is a file of packages and a config. They are installed as they are, each line by a call of pip, into a virtual
environment that also has the packages of this one. Then `stagecoach check --load` reads their examples, and `stagecoach
run` trains two steps: each package has its own servers, all share an engine and a learner. Files in `data` stand in for
data sets of the hub. DIRECTORY holds `sources`, the checkouts that lines of packages name, and gets the rest.
See docs/public-environments.md.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

from tasks.learner.tiny import tiny_qwen3
from tasks.learner.tiny_vision import tiny_qwen3_vl

HERE = Path(__file__).parent
OUTCOMES = """select environment, step, outcome, detail, count(*) as rollouts, avg(reward) as reward,
min(error_message) as message from rollouts where for_training group by all order by all"""


def main() -> None:
    """Install the packages of a batch, check them, train them, and print what came of the rollouts."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    root, batch = Path(sys.argv[1]).resolve(), sys.argv[2]
    config, python = HERE / f"{batch}.toml", root / batch / "venv/bin/python"
    if not python.exists():
        _install(batch, root, python)
    make_model = tiny_qwen3_vl if batch == "pictures" else tiny_qwen3
    model = make_model(root / batch / "model", max_positions=8192)
    settings = [str(HERE / "two_steps.toml"), str(config), f"model.path={model}"]
    store = ["--store", str(root / batch / "store")]
    for command in (
        ["check", "--load", *settings],
        ["run", "--plain", "--name", batch, *settings, *store],
        ["sql", "--json", OUTCOMES, *store],
    ):
        subprocess.run([str(python), "-m", "flows.cli", *command], cwd=HERE / "data", timeout=900, check=True)


def _install(batch: str, root: Path, python: Path) -> None:
    venv.create(root / batch / "venv")
    (site,) = python.parents[1].glob("lib/*/site-packages")
    (site / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    # Of this release, so that pip does not take another one for the sake of a package.
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", f"verifiers=={version('verifiers')}"]
    for line in (HERE / f"{batch}.txt").read_text().splitlines():
        subprocess.run([*pip, *line.split()], cwd=root, check=False)


if __name__ == "__main__":
    main()

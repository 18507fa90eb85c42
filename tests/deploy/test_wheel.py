"""The wheel in an environment without a checkout, used from a directory whose files are named as our packages."""

import json
import subprocess
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from configs.environments import EnvironmentConfig
from configs.layers import presets
from configs.load import load
from flows.orchestration.deployment_file import read
from tasks.inference.environments.packages import package_version
from tests.acceptance.first_hour import FROM, MORE, FirstHour
from tests.fixtures.installed import build_wheel, hostile_directory, install_wheel, variables

pytestmark = pytest.mark.engine

SHORT_DEMO = """
import dataclasses, sys
from flows.runtime.demo_sources import RECIPES
RECIPES["demo"] = dataclasses.replace(
    RECIPES["demo"],
    demonstrations=("sample_reverse_text --count 640 --right 0.14 --untagged 0.70 --max-length 5 --seed 1",),
    warm_up=("steps=1", "assignment.groups_per_step=640", "packing.updates_per_step=4", "training.warmup_steps=1"),
)
from flows.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""The demo with a warm-up of four updates: what it learns is shown elsewhere."""


@dataclass(frozen=True)
class Installed:
    """The program as the wheel installs it."""

    wheel: Path
    python: Path
    directory: Path
    """Where its commands are given."""

    def run(self, *command: str, timeout: float = 120.0, **more: str) -> subprocess.CompletedProcess[str]:
        """Run something from the directory and return how it ended."""
        return subprocess.run(
            command,
            cwd=self.directory,
            env=variables() | more,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def stagecoach(self, *arguments: str) -> str:
        """Run a command, which must succeed, and return what it printed."""
        done = self.run(str(self.python.with_name("stagecoach")), *arguments)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel of this checkout, built and installed once."""
    directory = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(directory)
    python = install_wheel(wheel, directory / "environment")
    return Installed(wheel, python, hostile_directory(directory / "of a person"))


def test_nothing_but_the_wheel_is_used(installed: Installed) -> None:
    look = "import flows, tasks, sample_reverse_text as s; print(flows.__file__, tasks.__file__, s.__file__)"
    done = installed.run(str(installed.python), "-P", "-c", look)
    assert done.returncode == 0, done.stderr
    assert all(str(installed.python.parents[1]) in each for each in done.stdout.split(".py") if each.strip())
    # The test can fail: without -P the person's files are what Python finds.
    assert installed.run(str(installed.python), "-c", look).returncode == 1


def test_the_wheel_has_what_presets_name_and_commands_read(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    named = {each.taskset["id"] for name in presets() for each in load([name]).environments}
    assert len(named) == 9 and {f"{each}/__init__.py" for each in (*named, "chat_loop", "own_data")} <= {*names}
    assert {f"configs/presets/{name}.toml" for name in presets()} <= {*names}
    assert {"flows/orchestration/prefect.yaml", "flows/viewer/templates/run.html", "flows/viewer/static/base.css"} <= {
        *names
    }
    assert not [name for name in names if name.startswith(("tests/", "examples/", "build/", "docs/"))]


def test_environments_have_the_version_that_they_have_in_a_checkout(installed: Installed) -> None:
    environment = EnvironmentConfig(name="poker", taskset={"id": "sample_kuhn_poker"}, harness={"id": "chat_loop"})
    ask = (
        "from configs.environments import EnvironmentConfig as C\n"
        "from tasks.inference.environments import packages as p\n"
        "print(p.package_version(C(name='poker', taskset={'id': 'sample_kuhn_poker'}, harness={'id': 'chat_loop'})))"
    )
    done = installed.run(str(installed.python), "-P", "-c", ask)
    assert done.stdout.strip() == package_version(environment), done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["check", "demo"], "sample_reverse_text"), (["--version"], "0.1.0")],
    ids=lambda each: each[0] if each else "",
)
def test_commands_from_a_directory_with_files_named_as_ours(
    installed: Installed, arguments: list[str], expected: str
) -> None:
    done = installed.run(str(installed.python.with_name("stagecoach")), *arguments)
    assert "stands in for the program" not in done.stdout + done.stderr
    assert expected in done.stdout, done.stderr


def test_a_flow_run_of_a_worker_imports_our_flow(installed: Installed) -> None:
    (given,) = {str(entry.work_pool.job_variables["env"]["PYTHONSAFEPATH"]) for entry in read(file_of(installed))}
    # As Prefect's worker starts a flow run: by `python -m`, in the working directory of the pool.
    look = ["-m", "runpy", "flows.orchestration.deployments"]
    assert installed.run(str(installed.python), *look, PYTHONSAFEPATH=given).returncode == 0
    assert "stands in" in installed.run(str(installed.python), *look).stderr


def file_of(installed: Installed) -> Path:
    """Return the file of deployments that the wheel brought."""
    (found,) = installed.python.parents[1].glob("lib/python*/site-packages/flows/orchestration/prefect.yaml")
    return found


def test_deploy_finds_its_file_and_says_that_a_server_is_missing(installed: Installed) -> None:
    done = installed.run(str(installed.python.with_name("stagecoach")), "deploy", PREFECT_PROFILE="ephemeral")
    assert done.returncode == 2 and "no Prefect server is configured" in done.stderr


@pytest.fixture(scope="module")
def demo(installed: Installed) -> subprocess.CompletedProcess[str]:
    """The first two steps of the demo, from the directory of files that are named as our packages."""
    (installed.directory / "short_demo.py").write_text(SHORT_DEMO)
    program = [str(installed.python), "-P", str(installed.directory / "short_demo.py")]
    arguments = ["demo", "steps=2", "evaluation.every=0", "--store", "stagecoach-store"]
    return installed.run(*program, *arguments, timeout=500.0)


@pytest.mark.timeout(600)
def test_the_first_two_steps_of_the_demo(installed: Installed, demo: subprocess.CompletedProcess[str]) -> None:
    assert demo.returncode == 0, demo.stdout[-2000:] + demo.stderr[-4000:]
    assert "demo" in installed.stagecoach("runs")
    page = installed.directory / "page.html"
    installed.stagecoach("view", "--save", "/runs/demo", str(page))
    assert "demo" in page.read_text()


RUN_NOTEBOOK = """
import json, sys
import nbclient, nbformat

notebook = nbformat.read(sys.argv[1], 4)
notebook.cells.insert(0, nbformat.v4.new_code_cell(sys.argv[2]))
try:
    nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3").execute()
finally:
    print("CELLS", json.dumps([each["outputs"] for each in notebook.cells if each["cell_type"] == "code"]))
"""
"""Runs a notebook in a real kernel, after a cell of ours, and prints what each cell put out."""
KERNEL = ("nbclient==0.11.0", "ipykernel==7.4.0")
"""In no lock: only the test of the notebook needs them."""
NOTEBOOK = Path(__file__).parents[2] / "examples/first_run.ipynb"


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_the_notebook_runs_in_a_real_kernel(installed: Installed, tmp_path: Path) -> None:
    done = installed.run(str(installed.python), "-I", "-m", "pip", "install", "--quiet", *KERNEL, timeout=300.0)
    assert done.returncode == 0, done.stderr[-4000:]
    # A directory of its own: a kernel looks for modules where its notebook is, first of all.
    here = replace(installed, directory=tmp_path)
    first = SHORT_DEMO.partition("from flows.cli import main")[0]
    done = here.run(str(here.python), "-P", "-c", RUN_NOTEBOOK, str(NOTEBOOK), first, timeout=700.0)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    cells = json.loads(done.stdout.partition("CELLS")[2])
    printed = "".join(each["text"] for outputs in cells for each in outputs if each["output_type"] == "stream")
    assert "step 2/2" in printed and "\x1b" not in printed, "progress, in plain lines"
    shown = [each["data"] for outputs in cells for each in outputs if each["output_type"] == "execute_result"]
    assert len(shown) == 9 and all(each["text/html"] for each in shown)
    texts = [each["text/plain"] for each in shown]
    assert texts[0].startswith("train demo: 2 steps") and "answer:" in texts[2] and "[assistant]" in texts[5]
    assert texts[7].startswith("replay leave-one-out: 2 steps") and "0 results computed" not in texts[7]


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_the_first_hour_of_the_installed_program(installed: Installed) -> None:
    directory = hostile_directory(installed.directory / "first hour")
    hour = FirstHour(directory, (str(installed.python.with_name("stagecoach")),))
    answers = hour.play(FROM | MORE)
    refused = {line for line, answer in answers.items() if answer.status == 2}
    said = next(answer.text for line, answer in answers.items() if line.startswith("run config.toml --name first"))
    assert "step 2/2" in said, said
    wrong = {"run config.toml training.learning_rat=1e-5", "edited", "check moved"}
    assert refused == wrong | {"init supervised", "init evals", "init serving"}
    assert not [answer for answer in answers.values() if answer.status not in (0, 2)], answers
    assert "stands in for the program" not in "".join(answer.text for answer in answers.values())
    assert "first" in (hour.project / "run.html").read_text(encoding="utf-8")


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = [each for each in json.loads(NOTEBOOK.read_text())["cells"] if each["cell_type"] == "code"]
    assert len(cells) > 6 and not [each for each in cells if each["outputs"] or each["execution_count"]]

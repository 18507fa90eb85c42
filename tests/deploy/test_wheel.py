"""The wheel with its extra `cpu` in a fresh environment, used from a directory whose files are named as our packages.

The environment shares nothing with the checkout, nor do its commands have this user's home, where vLLM keeps what it
knows of models.
"""

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from configs.environments import EnvironmentConfig
from configs.layers import presets
from configs.load import load
from flows.orchestration.deployments import read
from tasks.inference.environments.packages import package_version
from tests.fixtures.installed import (
    ROOT,
    Installed,
    build_wheel,
    hostile_directory,
    install_tool,
    install_wheel,
    variables,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel of this checkout, built and installed once."""
    directory = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(directory)
    python = install_wheel(wheel, directory / "environment")
    return Installed(wheel, python, hostile_directory(directory / "of a person"))


def test_nothing_but_the_wheel_is_used(installed):
    look = "import stagecoach, sample_reverse_text as s; print(stagecoach.__file__, s.__file__)"
    done = installed.run(str(installed.python), "-P", "-c", look)
    assert done.returncode == 0, done.stderr
    assert all(str(installed.python.parents[1]) in each for each in done.stdout.split(".py") if each.strip())


PERSON = """
import importlib, sys
first, second = sys.argv[1:]
modules = {name: importlib.import_module(name) for name in (first, second)}
assert modules["tasks"].reward() == "of the person" and modules["tasks"].__file__.endswith("/tasks.py")
import configs, flows, storage
assert {configs.PERSON, flows.PERSON, storage.PERSON} == {"person"}
from stagecoach import Credit, CustomConfig, FilterInput, RlTokens
assert Credit.__module__.startswith("stagecoach.tasks."), Credit.__module__
print("both")
"""


@pytest.mark.parametrize("order", [("tasks", "stagecoach"), ("stagecoach", "tasks")])
def test_a_person_s_modules_of_our_folders_names_and_ours_are_apart(installed, order, tmp_path):
    for name in ("configs.py", "storage.py", "flows/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("PERSON = 'person'\n")
    (tmp_path / "tasks.py").write_text("def reward():\n    return 'of the person'\n")
    done = replace(installed, directory=tmp_path).run(str(installed.python), "-c", PERSON, *order)
    assert done.stdout == "both\n", done.stderr


def test_the_wheel_has_what_presets_name_and_commands_read(installed):
    names = zipfile.ZipFile(installed.wheel).namelist()
    named = {each.taskset["id"] for name in presets() for each in load([name]).environments}
    assert len(named) == 10
    assert {f"{each}/__init__.py" for each in (*named, "chat_loop", "own_data", "program")} <= {*names}
    assert {f"stagecoach/configs/presets/{name}.toml" for name in presets()} <= {*names}
    read = (
        "orchestration/prefect.yaml",
        "orchestration/lost_runs.yaml",
        "orchestration/embedded.env",
        "orchestration/server.env",
        "services/hardware.toml",
        "cli/commands.toml",
        "viewer/templates/run.html",
        "viewer/static/base.css",
        "viewer/templates/plot.html",
    )
    data = {"stagecoach/tasks/learner/peaks.toml", "stagecoach/py.typed"}
    assert {f"stagecoach/flows/{name}" for name in read} | data <= {*names}
    metadata = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    others = {name.partition("/")[0] for name in names} - {"stagecoach", "chat_loop", "own_data", "program", *metadata}
    assert all(name.startswith("sample_") for name in others)


def test_environments_have_the_version_that_they_have_in_a_checkout(installed):
    environment = EnvironmentConfig(name="poker", taskset={"id": "sample_kuhn_poker"}, harness={"id": "chat_loop"})
    ask = (
        "from stagecoach.configs.environments import EnvironmentConfig as C\n"
        "from stagecoach.tasks.inference.environments import packages as p\n"
        "print(p.package_version(C(name='poker', taskset={'id': 'sample_kuhn_poker'}, harness={'id': 'chat_loop'})))"
    )
    done = installed.run(str(installed.python), "-P", "-c", ask)
    assert done.stdout.strip() == package_version(environment), done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["check", "demo"], "sample_reverse_text"), (["--version"], "0.1.0")],
    ids=lambda each: each[0] if each else "",
)
def test_commands_from_a_directory_with_files_named_as_ours(installed, arguments, expected):
    done = installed.run("stagecoach", *arguments)
    assert "stands in for the program" not in done.stdout + done.stderr
    assert expected in done.stdout, done.stderr


def test_a_flow_run_of_a_worker_imports_our_flow(installed):
    (given,) = {str(entry.work_pool.job_variables["env"]["PYTHONSAFEPATH"]) for entry in read(file_of(installed))}
    # As Prefect's worker starts a flow run: by `python -m`, in the working directory of the pool.
    look = ["-m", "runpy", "stagecoach.flows.orchestration.deployments"]
    assert installed.run(str(installed.python), *look, PYTHONSAFEPATH=given).returncode == 0
    assert "stands in" in installed.run(str(installed.python), *look).stderr


def file_of(installed):
    """Return the file of deployments that the wheel brought."""
    (found,) = installed.python.parents[1].glob("lib/python*/site-packages/stagecoach/flows/orchestration/prefect.yaml")
    return found


@pytest.mark.timeout(300)
def test_the_doctor_loads_what_the_demo_loads(installed):
    assert "engine and learner load" in installed.run("stagecoach", "doctor", timeout=280.0).stdout
    # A torchvision that does not import, and that no declaration mends.
    broken = installed.directory / "broken"
    broken.mkdir()
    (broken / "torchvision.py").write_text("raise OSError('a library of CUDA is missing')\n")
    done = installed.run("stagecoach", "doctor", timeout=280.0, PYTHONPATH=str(broken))
    assert done.returncode == 1 and "bad   programs: OSError: a library of CUDA is missing" in done.stdout


@pytest.mark.timeout(900)
def test_the_first_two_steps_of_the_demo(installed):
    done = installed.run("stagecoach", "demo", "steps=2", timeout=800.0)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "demo" in installed.stagecoach("runs")
    page = installed.directory / "page.html"
    installed.stagecoach("view", "--save", "/runs/latest", str(page))
    assert "demo" in page.read_text()
    # The checkout has the same keys: it finds all that the wheel has computed.
    store = installed.directory / "stagecoach-store"
    resume = [sys.executable, "-m", "flows.cli", "resume", "demo", "--store", str(store), "--plain"]
    resumed = subprocess.run(resume, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert "; 0 computed, " in resumed.stdout, resumed.stdout + resumed.stderr


def test_a_project_is_made_and_checked(installed):
    installed.stagecoach("init", "my-project")
    project = replace(installed, directory=installed.directory / "my-project")
    assert "my_reward" in project.stagecoach("check", "config.toml")


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_uv_installs_the_command_as_a_tool(tmp_path):
    command = install_tool(build_wheel(tmp_path), tmp_path)
    assert [path.name for path in command.parent.iterdir()] == ["stagecoach"]
    home = variables() | {"HOME": str(tmp_path)}
    for arguments, expected in (("--version", "0.1.0"), ("--help", "init"), ("check demo", "sample_reverse_text")):
        done = subprocess.run(
            [command, *arguments.split()],
            cwd=tmp_path,
            env=home,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr


NOTEBOOK = Path(__file__).parents[2] / "examples/first_run.ipynb"


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_the_notebook_runs_in_a_real_kernel(installed, tmp_path):
    # A directory of its own: a kernel looks for modules where its notebook is, first of all.
    here = replace(installed, directory=tmp_path)
    (tmp_path / NOTEBOOK.name).write_bytes(NOTEBOOK.read_bytes())
    done = here.run("jupyter", "execute", "--timeout=600", "--inplace", NOTEBOOK.name, timeout=800.0)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    notebook = json.loads((tmp_path / NOTEBOOK.name).read_text())
    cells = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    streams = [output["text"] for outputs in cells for output in outputs if output["output_type"] == "stream"]
    printed = "".join("".join(text) for text in streams)
    assert "step 2/2" in printed and "\x1b" not in printed, "progress, in plain lines"
    results = [output["data"] for outputs in cells for output in outputs if output["output_type"] == "execute_result"]
    assert len(results) == 9 and all(result["text/html"] for result in results)
    texts = ["".join(result["text/plain"]) for result in results]
    assert texts[0].startswith("train demo: 2 steps") and "answer:" in texts[2] and "[assistant]" in texts[5]
    assert texts[7].startswith("replay leave-one-out: 2 steps") and "0 results computed" not in texts[7]


def test_the_notebook_is_stored_without_outputs():
    cells = [each for each in json.loads(NOTEBOOK.read_text())["cells"] if each["cell_type"] == "code"]
    assert len(cells) > 6 and not [each for each in cells if each["outputs"] or each["execution_count"]]

"""What commands import: one that prints a table loads no engine, no scheduler and no model."""

import subprocess
import sys

import pytest

from flows.cli.commands import COMMANDS

pytestmark = pytest.mark.engine

WORLDS = {"prefect", "torch", "vllm", "transformers", "verifiers", "renderers", "tokenizers", "safetensors", "peft"}
WEB = {"wandb", "fastapi", "uvicorn", "jinja2", "httpx"}
NOT_TO_LOOK = {*WORLDS, *WEB, "multiprocessing", "flows.runtime.session", "tasks.stage_tasks"}
NOT_TO_QUERY = {*WORLDS, *WEB, "multiprocessing", "psutil"}
"""Views of rollouts take outcomes from the run's config."""
QUERIES = [["sql", "select count(*) from traces"], ["why", "TRACE"], ["lineage", "TRACE"]]
LOOKS = [["runs"], ["show", "large"], ["trace", "TRACE", "--run", "large"], ["diff", "large", "large-again"]]


def loaded_by(*commands, status=0):
    """Return the modules that are loaded after some commands ran in a fresh interpreter, and ended with a status."""
    script = (
        "import sys\nfrom flows import cli\n"
        f"assert all(cli.main(argv) == {status} for argv in {[list(argv) for argv in commands]!r})\n"
        "print('LOADED', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


HEAVY = {*WORLDS, *WEB, "duckdb", "polars", "pyarrow", "pydantic", "numpy", "deltalake"}


@pytest.mark.parametrize(
    ("commands", "status", "some", "none"),
    [
        ([["--help"]], 0, "flows.cli.commands", {*HEAVY, "cyclopts", "flows.cli.show"}),
        ([[name, "--help"] for name in COMMANDS], 0, "flows.cli.show", HEAVY),
        ([["check", "demo"]], 0, "pyarrow", {*WORLDS, *WEB, "duckdb"} - {"uvicorn"}),
        ([["run", "algorithm.type=gpro"]], 2, "polars", {*WORLDS, "pandas", "pyarrow.dataset", "wandb", "fastapi"}),
    ],
    ids=["help", "help of commands", "check", "a run that is refused"],
)
def test_commands_without_a_store(commands, status, some, none):
    loaded = loaded_by(*commands, status=status)
    assert some in loaded and not loaded & none


@pytest.mark.parametrize(
    ("commands", "some", "none"),
    [
        (QUERIES, {"polars", "duckdb"}, NOT_TO_QUERY),
        ([*LOOKS, ["evals", "large"]], {"polars", "configs.run"}, NOT_TO_LOOK),
    ],
    ids=["queries about rows", "looking at runs"],
)
def test_commands_that_look_at_a_store(forked, trace_id, commands, some, none):
    argvs = [[trace_id if word == "TRACE" else word for word in argv] for argv in commands]
    loaded = loaded_by(*([*argv, "--store", str(forked)] for argv in argvs))
    assert some <= loaded and not loaded & none

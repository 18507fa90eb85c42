"""What commands import: one that prints a table waits for no engine, no scheduler and no model."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flows.cli.commands import COMMANDS

WORLDS = {"prefect", "torch", "vllm", "transformers", "verifiers", "renderers", "tokenizers", "safetensors", "peft"}
"""What engines, models, environments and Prefect are made of."""
NOT_TO_LOOK = WORLDS | {"wandb", "fastapi", "uvicorn", "jinja2", "httpx", "asyncio", "duckdb", "multiprocessing"}
"""Of no use to who prints a table."""
NOT_TO_ASK = {*(NOT_TO_LOOK - {"duckdb", "asyncio"}), "pydantic", "psutil", "configs.run"}
"""Of no use to questions about rows, which read no config; duckdb answers those in SQL and asks for asyncio."""


def loaded_by(*commands: Sequence[str], status: int = 0) -> set[str]:
    """Return the modules that are loaded after some commands ran in a fresh interpreter, and ended with a status."""
    script = (
        "import sys\nfrom flows import cli\n"
        f"assert all(cli.main(argv) == {status} for argv in {[list(argv) for argv in commands]!r})\n"
        "print('LOADED', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


@pytest.mark.engine
def test_help_loads_no_command_and_nothing_that_does_its_work() -> None:
    loaded = loaded_by(["--help"])
    assert "flows.cli.commands" in loaded and not loaded & {"cyclopts", "flows.cli.show", "flows.cli.run"}
    assert not loaded & {"pydantic", "numpy", "pyarrow", "polars"}


@pytest.mark.engine
def test_help_of_commands_loads_no_engine_no_scheduler_and_no_server() -> None:
    loaded = loaded_by(*([name, "--help"] for name in COMMANDS))
    assert {"flows.cli.show", "polars"} <= loaded
    assert not loaded & (WORLDS | {"wandb", "fastapi", "uvicorn", "jinja2", "httpx", "duckdb"})


@pytest.mark.engine
def test_check_loads_neither_engine_nor_prefect() -> None:
    loaded = loaded_by(["check", "demo"])
    assert "pyarrow" in loaded
    assert not loaded & (WORLDS | {"wandb", "fastapi", "jinja2", "httpx", "duckdb"})


@pytest.mark.engine
def test_a_run_that_is_refused_waits_for_no_pandas() -> None:
    loaded = loaded_by(["run", "algorithm.type=gpro"], status=2)
    assert "polars" in loaded
    assert not loaded & (WORLDS | {"pandas", "pyarrow.dataset", "wandb", "fastapi"})


@pytest.mark.engine
def test_questions_about_rows_load_no_config(forked: Path, trace_id: str) -> None:
    asked = [["sql", "select count(*) from traces"], ["why", trace_id], ["lineage", trace_id]]
    loaded = loaded_by(*([*argv, "--store", str(forked)] for argv in asked))
    assert {"polars", "duckdb"} <= loaded
    assert not loaded & NOT_TO_ASK


@pytest.mark.engine
def test_looking_at_runs_loads_nothing_that_runs_them(forked: Path, trace_id: str) -> None:
    asked = [
        ["runs"],
        ["show", "large"],
        ["trace", trace_id, "--run", "large"],
        ["diff", "large", "large-again"],
        ["evals", "large"],
    ]
    loaded = loaded_by(*([*argv, "--store", str(forked)] for argv in asked))
    assert {"polars", "configs.run"} <= loaded
    assert not loaded & (NOT_TO_LOOK | {"flows.runtime.session", "tasks.stage_tasks", "flows.orchestration.server"})


@pytest.mark.engine
def test_a_question_from_a_shell_imports_no_polars(forked: Path) -> None:
    argv = [sys.executable, "-X", "importtime", "-m", "flows.cli", "sql", "select count(*) from traces"]
    done = subprocess.run([*argv, "--store", str(forked)], capture_output=True, text=True, check=True, timeout=120)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"pyarrow.dataset", "duckdb"} <= loaded
    assert "polars" not in loaded  # a table that is stored needs no frames

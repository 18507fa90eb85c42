"""Shell completion: what a real bash offers for half-typed words."""

import shutil
import subprocess
import sys

import pytest

from flows import cli
from storage.store import open_store
from tests.fixtures.programs import environment

OFFERED = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_stagecoach
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The installed script, with a program beside it that it asks."""
    place = tmp_path_factory.mktemp("completion")
    program = place / "stagecoach"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m flows.cli "$@"\n')
    program.chmod(0o755)
    target = place / "completion.bash"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(place))  # a line is added to ~/.bashrc
        assert cli.main(["--install-completion", "--shell", "bash", "--output", str(target)]) == 0
    assert str(target) in (place / ".bashrc").read_text()
    return target


@pytest.mark.engine
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (("sho",), ["show"]),
        (("show", "--las"), ["--last"]),
        (("export", "--format", "verif"), ["verifiers"]),
        (("run", "mine.toml", "algorithm.ty"), ["algorithm.type="]),
        (("resume", "fir"), ["first"]),
        (("view", "--run", "fir"), ["first"]),
        (("eval", "--policy", "fir"), ["first"]),
    ],
    ids=" ".join,
)
def test_bash_offers_commands_options_and_choices(script, typed, offered):
    variables = environment()
    open_store(script.parent / "stagecoach-store").runs.record(run="first", event="started", kind="train", config={})
    variables["STAGECOACH_STORE"] = str(script.parent / "stagecoach-store")
    variables["PATH"] = f"{script.parent}:{variables['PATH']}"
    asked = ["bash", "--norc", "-c", OFFERED, "bash", str(script), "stagecoach", *typed]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60, env=variables)
    assert done.stdout.split() == offered

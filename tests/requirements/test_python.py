"""The shell of installing: which Python makes .venv, on which platforms, and what becomes of a .venv that is there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "requirements/install.sh"
TOOLS = ("bash", "cat", "chmod", "env", "mktemp", "rm", "touch", "uname")
REAL = Path(sys.executable).resolve()

PYTHON = """#!/usr/bin/env bash
# A Python that says it is another release, and makes environments with an empty pip: a real one takes seconds.
if [ "$1" = -c ]; then exec {real} -c "import sys; sys.version_info = {release}
$2"; fi
case "$*" in
    "-m venv .venv")
        echo "$0" > made
        {real} -m venv --without-pip .venv || exit 1
        for folder in .venv/lib/python3*/site-packages; do : > "$folder/pip.py"; done ;;
    *"pip install"*) {pip} ;;
    *) exec {real} "$@" ;;
esac
"""
UV = """#!/usr/bin/env bash
echo "$*" >> uv-calls
[ "$2" != find ] || echo {found}
exit {status}
"""


@pytest.fixture
def project(tmp_path):
    """A checkout with a lock, and a machine that has a shell and no Python."""
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/cpu.txt").touch()
    (tmp_path / "requirements/gpu.txt").touch()
    (tmp_path / "requirements/install.py").write_text("print('filled')\n")
    return tmp_path


def add(file, text):
    """Write a program."""
    file.write_text(text)
    file.chmod(0o755)
    return file


def add_python(project, name, release, pip="exit 1"):
    """Let the machine have a Python of a release such as 3.12."""
    version = f"({release.replace('.', ', ')}, 0, 'final', 0)"
    return add(project / "bin" / name, PYTHON.format(real=REAL, release=version, pip=pip))


def install(project, lock="cpu", **variables):
    """Run the script with nothing but the machine's programs."""
    environment = {"PATH": str(project / "bin"), "HOME": str(project), "TMPDIR": str(project), **variables}
    command = ["bash", str(SCRIPT), lock, f".venv/installed-{lock}-1"]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("release", ["3.11", "3.12", "3.13"])
def test_a_python_that_fits_is_taken(release, project):
    add_python(project, "python3", release)
    done = install(project)
    assert done.returncode == 0, done.stderr
    assert "filled" in done.stdout
    assert (project / ".venv/installed-cpu-1").exists()


@pytest.mark.parametrize("release", ["3.10", "3.14"])
def test_a_python_that_does_not_fit_is_passed_over(release, project):
    add_python(project, "python3", release)
    add_python(project, "python3.12", "3.12")
    assert install(project).returncode == 0
    assert (project / "made").read_text().strip().endswith("bin/python3.12")


def test_the_python_that_was_asked_for_is_taken_or_refused(project):
    add_python(project, "python3.11", "3.11")
    other, old = add_python(project, "mine", "3.13"), add_python(project, "old", "3.9")
    refused = install(project, PYTHON=str(old))
    assert refused.returncode == 1
    assert "is no CPython 3.11 to 3.13" in refused.stderr
    assert not (project / ".venv").exists()
    assert install(project, PYTHON=str(other)).returncode == 0
    assert (project / "made").read_text().strip() == str(other)


@pytest.mark.parametrize(
    ("lock", "driver", "says"),
    [
        ("gpu", "echo 570.12; echo 570.12", "driver 580 or newer; this machine has 570.12. Update it"),
        ("gpu", "echo 580.65.06", ""),
        ("gpu", "echo NVIDIA-SMI has failed; exit 9", "none answers on this machine"),
        ("gpu", None, "none answers on this machine"),
        ("cpu", "echo 570.12", ""),
    ],
)
def test_a_driver_that_is_too_old_for_the_gpu_lock_is_told_of(lock, driver, says, project):
    add_python(project, "python3.11", "3.11")
    if driver:
        add(project / "bin/nvidia-smi", f"#!/usr/bin/env bash\n{driver}\n")
    done = install(project, lock)
    assert done.returncode == 0 and says in done.stderr
    assert ("driver" in done.stderr) == bool(says)


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "armv7l"), ("Linux", "ppc64le")])
def test_a_platform_without_an_engine_is_told_of_the_container(system, machine, project):
    (project / "bin/uname").unlink()
    add(project / "bin/uname", f'#!/usr/bin/env bash\n[ "$1" = -s ] && echo {system} || echo {machine}\n')
    add_python(project, "python3.11", "3.11")
    done = install(project)
    assert done.returncode == 1
    assert f"{system} on {machine}" in done.stderr
    assert "docker build -f deploy/Dockerfile" in done.stderr


def test_arm_has_an_engine(project):
    (project / "bin/uname").unlink()
    add(project / "bin/uname", '#!/usr/bin/env bash\n[ "$1" = -s ] && echo Linux || echo aarch64\n')
    add_python(project, "python3.11", "3.11")
    assert install(project).returncode == 0


def test_uv_brings_a_python_where_there_is_none(project):
    brought = add_python(project, "brought", "3.11")
    add(project / "bin/uv", UV.format(found=brought, status=0))
    done = install(project)
    assert done.returncode == 0, done.stderr
    assert "uv brings 3.11" in done.stderr
    assert (project / "uv-calls").read_text().splitlines()[0] == "python install 3.11"
    assert (project / "made").read_text().strip() == str(brought)


def test_the_pip_of_an_old_python_brings_uv(project):
    brought = add_python(project, "brought", "3.11")
    uv = add(project / "uv", UV.format(found=brought, status=0))
    # The folder is the word before the last: pip install ... --target FOLDER uv
    add_python(
        project,
        "python3",
        "3.9",
        pip=f"{REAL} -c \"import os; os.makedirs('${{@: -2:1}}/bin')\"; "
        f"{REAL} -c \"import shutil; shutil.copy('{uv}', '${{@: -2:1}}/bin/uv')\"",
    )
    done = install(project)
    assert done.returncode == 0, done.stderr
    assert (project / "made").read_text().strip() == str(brought)
    assert not list(project.glob("tmp.*"))


def test_without_python_and_uv_it_is_said_what_to_do(project):
    done = install(project)
    assert done.returncode == 1
    assert "PYTHON=/path/to/python make install" in done.stderr
    add_python(project, "python3", "3.9")
    assert install(project).returncode == 1
    add(project / "bin/uv", UV.format(found="", status=2))
    done = install(project)
    assert done.returncode == 1
    assert "uv could not bring Python 3.11" in done.stderr
    assert not (project / ".venv").exists()


def test_an_environment_of_another_python_that_fits_stays(project):
    add_python(project, "python3.13", "3.13")
    assert install(project).returncode == 0
    (project / ".venv/kept").touch()
    add_python(project, "python3.11", "3.11")
    assert install(project).returncode == 0
    assert (project / ".venv/kept").exists()


def test_an_environment_of_the_other_lock_is_made_anew(project):
    add_python(project, "python3.11", "3.11")
    assert install(project).returncode == 0
    (project / ".venv/kept").touch()
    done = install(project, "gpu")
    assert "Removing .venv" in done.stdout
    assert not (project / ".venv/kept").exists()
    assert [file.name for file in (project / ".venv").glob("installed-*")] == ["installed-gpu-1"]


def test_an_interrupted_install_leaves_no_stamp_and_is_taken_up_again(project):
    add_python(project, "python3.11", "3.11")
    assert install(project).returncode == 0
    (project / "requirements/install.py").write_text("import sys\nsys.exit(1)\n")
    assert install(project).returncode == 1
    assert list((project / ".venv").glob("installed-*")) == []
    (project / ".venv/kept").touch()
    (project / "requirements/install.py").write_text("")
    assert install(project).returncode == 0
    assert {file.name for file in (project / ".venv").iterdir()} >= {"installed-cpu-1", "kept"}


def test_make_does_nothing_once_it_is_done(project):
    make = shutil.which("make")
    assert make is not None
    root = SCRIPT.parents[1]
    for name in ("Makefile", "pyproject.toml", "requirements/install.sh"):
        shutil.copy(root / name, project / name)
    add_python(project, "python3.11", "3.11")
    environment = {**os.environ, "PATH": f"{project / 'bin'}:{os.environ['PATH']}", "STAGECOACH_LOCK": "cpu"}
    environment.pop("PYTHON", None)
    command = [make, "--no-print-directory", "install"]
    first = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert "Installed; the next call finds it done" in first.stdout, first.stderr
    second = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert "filled" not in second.stdout
    (project / "requirements/cpu.txt").write_text("more==1\n")
    third = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert "filled" in third.stdout

"""The packages of installing: which build of torch, from where and with what, against a local index of stand-ins."""

import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import threading
import venv
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

FILE = Path(__file__).parents[2] / "requirements/install.py"
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
import install
install.TORCH_INDEX = sys.argv[2]
sys.exit(install.main("cpu", "stamp"))
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "project"
version = "1"
"""
BACKEND = """
import zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    info = "project-1.dist-info"
    with zipfile.ZipFile(f"{folder}/project-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: project\\nVersion: 1\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return "project-1-py3-none-any.whl"
"""
CPU, CUDA = "import tool", "import tool, stand_in_cuda"
"""What a build of torch does when it is imported: both need something of the lock, one the libraries of CUDA."""


def add_wheel(folder, name, version, files, requires=""):
    """Write a wheel of files into the folder of its package; return its hash."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    file = folder / name / f"{stem}-py3-none-any.whl"
    texts = {
        **files,
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(file, "w") as wheel:
        for path, text in texts.items():
            member = zipfile.ZipInfo(path)
            member.external_attr = (stat.S_IFREG | (0o755 if "/scripts/" in path else 0o644)) << 16
            wheel.writestr(member, text)
    return hashlib.sha256(file.read_bytes()).hexdigest()


class Machine:
    """A project with an environment of its own, a package index, and an index of PyTorch's."""

    def __init__(self, root, address, asked):
        self.root, self.address, self.asked = root, address, asked
        self.packages, self.torch = root / "served/simple", root / "served/whl/cpu"
        for folder in (self.packages, self.torch, root / "project/requirements"):
            folder.mkdir(parents=True)
        self.python = root / "environment/bin/python"
        venv.create(root / "environment", with_pip=False)
        # Not `find_spec`: setuptools takes a look at pip for pip's start, and cannot be imported any more.
        found = PathFinder.find_spec("pip")
        assert found is not None and found.origin is not None
        (libraries,) = root.glob("environment/lib/python*/site-packages")
        (libraries / "pip").symlink_to(Path(found.origin).parent)
        (root / "project/pyproject.toml").write_text(PROJECT)
        (root / "project/backend.py").write_text(BACKEND)
        digest = add_wheel(self.packages, "tool", "1.0", {"tool.py": ""})
        self.write_lock(digest)
        cuda = add_wheel(self.packages, "stand-in-cuda", "1.0", {"stand_in_cuda.py": ""})
        torch = add_wheel(self.packages, "torch", "2.13.0", {"torch.py": CUDA}, "Requires-Dist: stand-in-cuda\n")
        text = f"torch==2.13.0 --hash=sha256:{torch}\nstand-in-cuda==1.0 --hash=sha256:{cuda}\n"
        (root / "project/requirements/gpu.txt").write_text(text)

    def write_lock(self, digest):
        """Write the cpu lock: torch, and one package of a hash."""
        text = f"tool==1.0 ; python_version > '3' \\\n    --hash=sha256:{digest}\ntorch==2.13.0\nuv==0.1\n"
        (self.root / "project/requirements/cpu.txt").write_text(text)

    def add_uv(self):
        """Let the index have uv."""
        script = f'#!/bin/sh\nexec {UV} "$@"\n'
        add_wheel(self.packages, "uv", "0.1", {"uv-0.1.data/scripts/uv": script})

    def install(self, **variables):
        """Install the project."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "PYTHON"))}
        settings = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"{self.address}/simple",
            "PIP_CACHE_DIR": str(self.root / "pip-cache"),
            "UV_CACHE_DIR": str(self.root / "uv-cache"),
            "UV_NO_CONFIG": "1",
            "NO_PROXY": "127.0.0.1",
        }
        command = [str(self.python), "-c", DRIVER, str(FILE.parent), f"{self.address}/whl/cpu"]
        environment = {**kept, **settings, **variables}
        return subprocess.run(command, cwd=self.root / "project", env=environment, capture_output=True, text=True)

    def version(self, name):
        """Return the version of an installed package."""
        code = f"from importlib.metadata import version; print(version('{name}'))"
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def machine(tmp_path):
    """A machine whose index has a build of torch for CUDA alone, and no uv."""
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tmp_path / "served"))

        def log_request(self, *_):
            asked.append(self.path)

        def log_message(self, *_):
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Machine(tmp_path, f"http://127.0.0.1:{server.server_port}", asked)
        server.shutdown()


WITH_UV = pytest.mark.skipif(UV is None, reason="uv is not installed")
WITH_BOTH = pytest.mark.parametrize("uv", [False, pytest.param(True, marks=WITH_UV)])


@WITH_UV
@pytest.mark.parametrize("setting", ["PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"])
def test_a_cpu_build_that_pip_knows_is_taken(setting, machine):
    machine.add_uv()
    add_wheel(machine.root / "served/own", "torch", "2.13.0+cpu", {"torch.py": CPU})
    places = {"PIP_FIND_LINKS": str(machine.root / "served/own/torch"), "PIP_EXTRA_INDEX_URL": f"{machine.address}/own"}
    done = machine.install(**{setting: places[setting]})
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.version("torch") == "2.13.0+cpu"
    assert machine.version("tool") == "1.0"
    assert machine.version("project") == "1"
    assert "uv could not" not in done.stdout
    assert [path for path in machine.asked if path.startswith("/whl")] == []


@WITH_BOTH
def test_the_cpu_build_of_pytorchs_own_index_is_next_and_that_is_asked_for_nothing_else(uv, machine):
    if uv:
        machine.add_uv()
    add_wheel(machine.torch, "torch", "2.13.0+cpu", {"torch.py": CPU})
    done = machine.install()
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.version("torch") == "2.13.0+cpu"
    assert {path for path in machine.asked if path.startswith("/whl") and "/torch/" not in path} == set()
    machine.asked.clear()
    assert ("uv cannot be had" in done.stdout) != uv
    assert machine.install().returncode == 0
    assert [path for path in machine.asked if "torch" in path] == []


def test_a_cpu_build_without_a_local_version_is_told_by_importing_it(machine):
    add_wheel(machine.packages, "torch", "2.13.0", {"torch.py": CPU})
    done = machine.install()
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.version("torch") == "2.13.0"
    assert [path for path in machine.asked if "cuda" in path] == []


@WITH_UV
def test_where_there_is_a_build_for_cuda_alone_its_libraries_come_too(machine):
    machine.add_uv()
    done = machine.install()
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.version("stand-in-cuda") == "1.0"
    assert "It is for CUDA" in done.stdout


def test_without_any_torch_it_is_said_where_to_get_one(machine):
    shutil.rmtree(machine.packages / "torch")
    done = machine.install()
    assert done.returncode == 1
    assert "PIP_FIND_LINKS" in done.stderr
    assert "2.13.0" in done.stderr


@WITH_UV
def test_other_bytes_than_those_of_the_lock_are_refused(machine):
    machine.add_uv()
    add_wheel(machine.torch, "torch", "2.13.0+cpu", {"torch.py": CPU})
    machine.write_lock("0" * 64)
    done = machine.install()
    assert done.returncode == 1
    assert "hash" in done.stdout.lower()
    assert "Try again" in done.stderr


def load():
    """Load the installer, which is no module of a package."""
    found = importlib.util.spec_from_file_location("install", FILE)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_settings_are_read_as_pip_reads_them(tmp_path, monkeypatch):
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = http://a/\ntimeout = 9\n[install]\nindex-url = http://b/\n[wheel]\ncert = x\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_TIMEOUT", "30")
    found = load().pip_settings()
    assert (found["index-url"], found["timeout"]) == ("http://b/", "30")
    assert found.get("cert") != "x"


def test_uv_looks_where_pip_does_and_its_own_settings_stay():
    settings = {
        "index-url": "http://a/simple",
        "extra-index-url": "\nhttp://b/simple\nhttp://c/simple",
        "find-links": "/one http://d/two",
        "no-cache-dir": "1",
        "quiet": "1",
    }
    found = load().uv_environment(settings, {"UV_INDEX_URL": "http://mine/", "UV_HTTP_RETRIES": "2"})
    assert found == {
        "UV_INDEX_URL": "http://mine/",
        "UV_INDEX": "http://b/simple http://c/simple",
        "UV_FIND_LINKS": "/one,http://d/two",
        "UV_NO_CACHE": "1",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_HTTP_RETRIES": "2",
        "UV_COMPILE_BYTECODE": "1",
    }


APT = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/asked"
case "$*" in *install*) : > "$FOLDER/libstagecoach.so.1" ;; esac
"""
MISSING = """
import os, sys
sys.path.insert(0, sys.argv[1])
import install
os.geteuid = lambda: int(sys.argv[2])
install.loads = lambda name: os.path.exists(f"{os.environ['FOLDER']}/{name}")
install.LIBRARIES = {"libstagecoach.so.1": "libstagecoach1"}
install.find_tools = lambda *_: sys.exit(77)  # what is installed next
sys.exit(install.main("cpu", "stamp"))
"""


def install_with_library_missing(folder, user, apt):
    """Call the installer as a user, with a stand-in for apt-get, up to where it would download something."""
    (folder / "requirements").mkdir()
    (folder / "requirements/cpu.txt").touch()
    if apt:
        (folder / "apt-get").write_text(apt)
        (folder / "apt-get").chmod(0o755)
    environment = {**os.environ, "PATH": str(folder) + ":/bin:/usr/bin" if apt else str(folder), "FOLDER": str(folder)}
    command = [sys.executable, "-c", MISSING, str(FILE.parent), user]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_library_of_the_system_that_is_missing_is_installed_before_anything_is_downloaded(tmp_path):
    done = install_with_library_missing(tmp_path, "0", APT)
    update, packages = (tmp_path / "asked").read_text().splitlines()
    assert update.endswith("update") and packages.endswith("install -y --no-install-recommends libstagecoach1")
    assert (done.returncode, done.stderr) == (77, "")


@pytest.mark.parametrize(("user", "apt"), [("1000", APT), ("0", ""), ("0", "#!/bin/sh\nexit 100\n")])
def test_where_it_cannot_be_installed_it_is_said_how(user, apt, tmp_path):
    done = install_with_library_missing(tmp_path, user, apt)
    assert done.returncode == 1
    assert "libstagecoach.so.1, which this system lacks" in done.stderr and "apt install libstagecoach1" in done.stderr
    assert not (tmp_path / "asked").exists(), "only root may"

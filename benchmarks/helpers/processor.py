"""Processor time of a run by component: that of its processes, distinguished by their command lines."""

from collections import defaultdict

import psutil

PROCESSES = {
    "tasks.inference.engine.host": "engine",
    "tasks.inference.environments.host": "environment server",
    "tasks.learner.worker": "learner",
    "server_process.py": "Prefect",
    "guardian.py": "guardians",
}
_components: dict[int, str] = {}


def processor_seconds() -> dict[str, float]:
    """Return the processor seconds that each component's processes have used so far."""
    seconds: dict[str, float] = defaultdict(float)
    flow = psutil.Process()
    for process in (flow, *flow.children(recursive=True)):
        try:
            component = "flow" if process == flow else component_of(process)
            times = process.cpu_times()
        except psutil.Error:
            continue  # it has just ended
        seconds[component] += times.user + times.system
    return seconds


def component_of(process: psutil.Process) -> str:
    """Return the component of a process; one with an unknown command line belongs to its parent's."""
    if process.pid not in _components:
        words = process.cmdline()
        names = [name for part in words[1:4] for key, name in PROCESSES.items() if part.endswith(key)]
        parent = process.parent()
        inherited = _components.get(parent.pid, "other") if parent else "other"
        _components[process.pid] = names[0] if names else inherited
    return _components[process.pid]

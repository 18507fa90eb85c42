"""A flow that owns two services, says so, and waits to be ended: by itself, an exception or a signal."""

import sys
import time
from pathlib import Path

from flows.processes.services import ServiceSpec, Supervisor

PROGRAMS = Path(__file__).parent


def main(directory: str, ending: str) -> None:
    with Supervisor("run", Path(directory)) as supervisor:
        handles = []
        for name in ("stubborn", "polite"):
            report = Path(directory) / f"{name}.json"
            argv = [sys.executable, str(PROGRAMS / f"{name}.py"), str(report)]
            log = Path(directory) / f"{name}.log"
            spec = ServiceSpec(name, argv, {}, report, log, lambda _: True, 30.0, 0, grace_seconds=0.5)
            handles.append(supervisor.start(spec))
        for handle in handles:
            handle.wait()
        print("ready", flush=True)
        if ending == "raise":
            raise RuntimeError("the flow went wrong")
        if ending == "wait":
            time.sleep(600)


main(*sys.argv[1:])

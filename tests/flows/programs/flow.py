"""A flow that owns two services, says so, and waits to be ended: by itself, an exception or a signal."""

import sys
from pathlib import Path

from flows.services.base import Supervisor
from flows.services.process import ServiceSpec
from tests.fixtures.waiting import PATIENCE, until_told

PROGRAMS = Path(__file__).parent


def main(directory: str, ending: str) -> None:
    with Supervisor("run", Path(directory)) as supervisor:
        handles = []
        for name, grace in (("stubborn", 0.5), ("polite", PATIENCE)):
            report = Path(directory) / f"{name}.json"
            argv = [sys.executable, str(PROGRAMS / f"{name}.py"), str(report)]
            log = Path(directory) / f"{name}.log"
            spec = ServiceSpec(name, argv, {}, report, log, lambda _: True, PATIENCE, 0, grace_seconds=grace)
            handles.append(supervisor.start(spec))
        for handle in handles:
            handle.wait()
        print("ready", flush=True)
        if ending == "raise":
            raise RuntimeError("the flow went wrong")
        if ending == "wait":
            until_told()


main(*sys.argv[1:])

"""A process with an embedded Prefect API that runs a flow of three tasks and says, as JSON lines, what it sees."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from flows.orchestration import server as prefect_api
from flows.services.guardian import send
from flows.services.ownership import identity, owned
from tests.fixtures.waiting import until_told


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def main(directory: str, ending: str) -> None:
    begun = time.monotonic()
    api = prefect_api.begin(Path(directory))
    say(begun=time.monotonic() - begun, url=api.url, embedded=api.embedded)
    assert prefect_api.begin(Path(directory, "another")) is api
    api.wait()
    say(ready=time.monotonic() - begun, owner=identity())
    from prefect import flow, tags, task
    from prefect.runtime import flow_run

    from flows.orchestration.server import route_prefect_logs
    from flows.reporting import artifacts

    route_prefect_logs(Path(directory).parent / "flow.log")

    @task
    def stage(number: int) -> int:
        return number

    @flow
    def train() -> None:
        for number in range(3):
            stage.with_options(task_run_name=f"rollout-{number}")(number)
        say(flow_run=str(flow_run.id), cancelled=prefect_api.cancelled(flow_run.id))
        shown = artifacts.RunArtifacts("Demo_1", "/store", num_steps=2)
        steps = [{"step": k, "reward": 0.1 + k, "seconds": {"rollout": 1.5}, "rows": {"rollout": 8}} for k in range(2)]
        say(published=[shown.publish(steps[:1]), shown.publish(steps)])
        if ending == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if ending == "wait":
            until_told()
        if ending == "server":
            send(signal.SIGKILL, owned(identity()))  # a server goes by itself when its guardian has
            stage.with_options(task_run_name="rollout-3")(3)

    with prefect_api.termination_reported(), tags(*prefect_api.run_tags("demo")):
        train()
    say(ended=True)


main(*sys.argv[1:])

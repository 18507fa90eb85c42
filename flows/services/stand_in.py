"""Stands in for a service on a work pool: `python -m flows.services.stand_in REQUEST REPORT`, two files.

It asks Prefect for the flow run that the request describes, writes the address that the flow run has published into the
report, and renews the flow run's lease. It ends when the flow run does, and cancels it when it is told to end. Where it
is killed, nobody renews the lease, and the service ends by itself.
"""

import itertools
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.services.pools import ADDRESS, BEAT_SECONDS, BEATS_OF_A_LEASE, PULSE, RENEWED, SEEN, RenewalWatch
from tasks.inference.engine.host import write_report


def main(argv: Sequence[str]) -> int:
    """Stand in until the flow run ends or SIGTERM; return 0 after a signal, else 1."""
    request_file, report = map(Path, argv)
    stop = threading.Event()
    # Only noted: a flow run that is being made when the signal comes must be known, or it could not be cancelled.
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    request = json.loads(request_file.read_text(encoding="utf-8"))
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(request["deployment"])
        flow_run = client.create_flow_run_from_deployment(
            deployment.id, parameters=request["parameters"], name=request["name"], tags=request["tags"]
        )
        print(f"asked {client.api_url} for flow run {flow_run.id} of {request['deployment']}", flush=True)
        try:
            return _stand_in(client, flow_run.id, request["lease_seconds"], report, stop)
        finally:
            _cancel(client, flow_run.id)


def _stand_in(client: Any, flow_run_id: Any, lease_seconds: float, report: Path, stop: threading.Event) -> int:
    """Renew the lease and look at the flow run, until it ends or `stop` is set."""
    import httpx

    renewals, numbers = RenewalWatch(lease_seconds), itertools.count(1)
    reported, renewed = "", -lease_seconds
    while not stop.wait(BEAT_SECONDS):
        try:
            if time.monotonic() - renewed >= lease_seconds / BEATS_OF_A_LEASE:
                client.update_flow_run_labels(flow_run_id, {RENEWED: next(numbers)})
                renewed = time.monotonic()
            found = client.read_flow_run(flow_run_id)
        except httpx.HTTPError as problem:  # the service works without Prefect, and so may the run
            print(f"Prefect does not answer: {type(problem).__name__}: {problem}", flush=True)
            continue
        state, said = found.state, found.labels or {}
        if state is None or state.is_final():
            print(f"flow run {flow_run_id} ended: {state and state.name}: {state and state.message}", flush=True)
            return 1
        # A label may be lost for a while, to a write of another one at the same moment; the service is where it was.
        if (address := str(said.get(ADDRESS, ""))) not in ("", reported):
            pulse = str(said.get(PULSE, ""))
            write_report(report, {"url": address, "address": address, "pulse": pulse, "flow_run": str(flow_run_id)})
            reported = address
        # Before its first word it waits for a worker, which may take long.
        if SEEN in said and not renewals.look(said[SEEN]):
            print(f"flow run {flow_run_id} has said nothing for {lease_seconds:.0f} s: its machine is gone", flush=True)
            return 1
    return 0


def _cancel(client: Any, flow_run_id: Any) -> None:
    """Give the flow run back, unless it has ended; if Prefect refuses for longer than this process has, it lapses."""
    import httpx
    from prefect.states import Cancelling

    while True:
        try:
            if (state := client.read_flow_run(flow_run_id).state) is not None and not state.is_final():
                client.set_flow_run_state(flow_run_id, Cancelling(message="its run needs it no more"))
                print(f"cancelled flow run {flow_run_id}", flush=True)
            return
        except httpx.HTTPError as problem:
            print(f"Prefect has not taken it back: {type(problem).__name__}: {problem}", flush=True)
            time.sleep(BEAT_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""GPU slots: of all runs that report to one Prefect server, only so many have an engine or a learner at a time.

`stagecoach deploy` records how many in a variable of Prefect. A run takes a slot before it starts its first service and
returns it when the last one is gone, whichever deployment or command line it comes from. Without the variable, no run
waits.

A slot is a variable as well. The run that holds it has created it, which fails where it exists, and renews its value. A
waiting run deletes a slot that it has seen unchanged for LEASE_SECONDS while the server answered. Renewal and deletion
name the variable's id, so neither touches the slot of a later holder. Prefect's own limits are not used: a server
forgets their leases when it restarts, and then neither frees the slot nor knows who holds it.
"""

import logging
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from flows.orchestration.server import (
    api_client,
    bookkeeping_only,
    cancellation,
    current_flow_run,
    is_shared,
    one_line,
)
from flows.orchestration.states import RunCancelled
from flows.services.pools import RenewalWatch

LIMIT = "stagecoach-gpu"
VARIABLE = "STAGECOACH_GPU_LIMIT"
"""Environment variable that names other slots: machines with a pool of their own have their own GPUs."""
LEASE_SECONDS = 60.0
"""A slot that was not renewed for so long is free: its process, its machine or its worker is gone."""
RENEW_SECONDS = 15.0
LOOK_SECONDS = 5.0
_log = logging.getLogger("stagecoach")


def variable_name(limit: str) -> str:
    """Return the variable of Prefect that holds the number of slots; such names have small letters alone."""
    return re.sub(r"[^a-z0-9-]+", "-", limit.lower())


@contextmanager
def gpu_slot(run: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold a slot for a run while the block runs, waiting without a timeout. Raises RunCancelled while it waits.

    `tell` gets a line when the run begins to wait, when other runs hold the slots, and when the slot is lost.
    """
    slot = _wait_for_slot(variable_name(os.environ.get(VARIABLE) or LIMIT), run, tell) if is_shared() else ""
    if not slot:
        yield
        return
    ended = threading.Event()
    threading.Thread(target=_renewer(slot, run, ended, tell), name="gpu slot", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        with bookkeeping_only(f"the end of its GPU slot, which is free in {LEASE_SECONDS:.0f} s"):
            _delete(slot)


def _wait_for_slot(limit: str, run: str, tell: Callable[[str], None]) -> str:
    """Return the id of the slot that the run holds now; empty where Prefect has no such limit."""
    import httpx

    renewals, said = defaultdict[str, RenewalWatch](lambda: RenewalWatch(LEASE_SECONDS, LOOK_SECONDS)), ""
    while True:
        holders: list[str] | None = None
        try:
            slot, holders = _try_slots(limit, run, renewals)
        except httpx.HTTPError as problem:
            slot = ""
            renewals.clear()  # while the server is away no holder can renew
            _log.warning("Prefect does not say who holds %s: %s", limit, one_line(problem))
        if slot or holders == []:
            return slot
        if cancellation(current_flow_run()):
            raise RunCancelled("cancelled while it waited for a GPU slot; nothing was started")
        waiting = f"waiting for a slot of {limit}, held by {', '.join(holders or ())}"
        if holders and waiting != said:
            tell(waiting)
            said = waiting
        time.sleep(LOOK_SECONDS)


def _try_slots(limit: str, run: str, renewals: Mapping[str, RenewalWatch]) -> tuple[str, list[str]]:
    """Return the id of a slot that was free, or else the runs that hold them; both empty where no such limit exists."""
    from prefect.client.schemas.actions import VariableCreate
    from prefect.exceptions import ObjectAlreadyExists

    holders = []
    with api_client() as client:
        recorded: Any = client.read_variable_by_name(limit)
        for index in range(recorded.value["slots"] if recorded else 0):
            name = f"{limit}-{index}"
            held: Any = client.read_variable_by_name(name)
            if held is not None and not renewals[name].look((held.id, held.value)):
                _log.warning("slot %s was not renewed for %.0f s by run %s", name, LEASE_SECONDS, held.value["run"])
                _delete(str(held.id))
                held = None
            if held is not None:
                holders.append(str(held.value["run"]))
                continue
            try:
                return str(client.create_variable(VariableCreate(name=name, value={"run": run, "renewal": 0})).id), []
            except ObjectAlreadyExists:
                holders.append("another run")
    return "", holders


def _renewer(slot: str, run: str, ended: threading.Event, tell: Callable[[str], None]) -> Callable[[], None]:
    """Return a function that renews a slot until `ended`, or until it is another run's. Its run continues even then."""
    import httpx  # before the thread begins, which imports nothing
    from prefect.client.orchestration import get_client

    def renew() -> None:
        renewal = 0
        while not ended.wait(RENEW_SECONDS):
            renewal += 1
            renewed = {"value": {"run": run, "renewal": renewal}}
            try:
                with get_client(sync_client=True) as client:
                    client.request("PATCH", "/variables/{id}", path_params={"id": slot}, json=renewed)
            except httpx.HTTPStatusError as problem:
                if problem.response.status_code == HTTPStatus.NOT_FOUND and not ended.is_set():
                    tell(
                        f"the GPU slot was unrenewed for {LEASE_SECONDS:.0f} s and is another run's; this run continues"
                    )
                    return
            except httpx.HTTPError:
                continue  # the server is away, and no other run can take the slot meanwhile

    return renew


def _delete(slot: str) -> None:
    """Delete a slot by its id; one that is gone already stays so."""
    import httpx

    try:
        with api_client() as client:
            client.request("DELETE", "/variables/{id}", path_params={"id": slot})
    except httpx.HTTPStatusError as problem:
        if problem.response.status_code != HTTPStatus.NOT_FOUND:
            raise

"""The GPU slot: of all runs that report to one Prefect server, only so many have an engine or a learner at a time.

`stagecoach deploy` makes the limit. A run takes a slot before it starts its first service and gives it back when the
last one is gone, whichever deployment or command line it comes from. Where Prefect has no such limit, nothing waits.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from flows.orchestration.server import cancelled, current_flow_run, is_shared
from flows.orchestration.states import RunCancelled

LIMIT = "stagecoach-gpu"
VARIABLE = "STAGECOACH_GPU_LIMIT"
"""Environment variable that names another limit: machines with a pool of their own have one each."""
LEASE_SECONDS = 60.0
"""How long the slot of a process that was killed stays taken."""
WAIT_SECONDS = 5.0
_log = logging.getLogger("stagecoach")


@contextmanager
def gpu_slot() -> Iterator[None]:
    """Hold a slot while the block runs, waiting for one as long as it takes. Raises RunCancelled while it waits."""
    if not is_shared():
        yield
        return
    import httpx

    slot = _taken(os.environ.get(VARIABLE) or LIMIT)
    try:
        yield
    finally:
        try:
            slot.__exit__(None, None, None)
        except httpx.HTTPError as problem:  # a run's data do not depend on the API, so its end must not
            _log.warning("the GPU slot could not be given back, it is free in %.0f s: %s", LEASE_SECONDS, problem)


def _taken(limit: str) -> AbstractContextManager[None]:
    """Return an entered context that holds a slot."""
    said = False
    while (slot := _tried(limit)) is None:
        if cancelled(current_flow_run()):
            raise RunCancelled("cancelled while it waited for a GPU slot; nothing was started")
        if not said:
            _show(f"waiting for a slot of {limit}: another run has an engine or a learner")
        said = True
        time.sleep(WAIT_SECONDS)
    if said:
        _show("")
    return slot


def _tried(limit: str) -> AbstractContextManager[None] | None:
    """Return an entered context that holds a slot; None where all are taken. Prefect logs each refusal: look first."""
    from prefect.client.orchestration import get_client
    from prefect.concurrency.sync import concurrency
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            found = client.read_global_concurrency_limit_by_name(limit)
        except ObjectNotFound:
            return nullcontext()
    if found.active_slots >= found.limit:
        return None
    # Not ended when the server is away for a while: what is trained is worth more than the slot's order.
    slot = concurrency(
        limit, lease_duration=LEASE_SECONDS, timeout_seconds=WAIT_SECONDS, raise_on_lease_renewal_failure=False
    )
    try:
        slot.__enter__()
    except TimeoutError:
        return None  # another run was faster
    return slot


def _show(waiting: str) -> None:
    """Show in Prefect that the run waits, or that it has done so; a refusal (a cancelled run, say) stands."""
    _log.info(waiting or "the GPU slot is ours")
    flow_run = current_flow_run()
    if flow_run:
        from prefect.client.orchestration import get_client
        from prefect.states import Running

        named: dict[str, Any] = {"name": "WaitingForGpu", "message": waiting} if waiting else {}
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run, Running(**named))

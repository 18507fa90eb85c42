"""Serves a run of another machine, as a flow run of its own: with an engine, a learner or an environment server.

The run asks for it (`flows.services.stand_in`), and it lasts as long as the run renews its lease. Where it answers is a
label of the flow run.
"""

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from configs.run import RunConfig
from configs.store import is_object_store
from flows.orchestration.server import api_client, current_flow_run
from flows.runtime.session import log_directory
from flows.services.base import RunService, Supervisor
from flows.services.engine import InferenceService
from flows.services.environments import EnvironmentServers
from flows.services.learner import LearnerNode
from flows.services.pools import (
    ADDRESS,
    BEAT_SECONDS,
    BEATS_OF_A_LEASE,
    PULSE,
    RENEWED,
    SEEN,
    RenewalWatch,
    address_of,
    require_proof,
    shared_key,
)
from flows.services.process import Handle, ServiceFailed
from storage.roots import open_root
from storage.store import FORMAT, open_store
from tasks.runtime.process_variables import BIND
from tasks.runtime.run_context import RunContext

AWAY_SECONDS = 1800.0
"""Without a word from Prefect for so long, a service does not believe any more that anybody needs it."""
CANCELLED_LOOKS = 5
"""In so many looks a flow run is being cancelled until it ends by itself: its worker has missed Prefect's event."""


@flow(name="serve")
def serve(
    config: dict[str, Any],
    proof: str,
    service: Literal["engine", "environment", "learner"] = "engine",
    member: str = "",
    source: str = "",
) -> str | State[str]:
    """Serve a run until it gives the service back, or does not renew its lease. Runs ask for this by themselves.

    Args:
        config: the resolved config of the run.
        proof: made of this request and the token that all machines share: nobody else can ask for a service.
        service: engine, environment or learner.
        member: which of them: the number of an engine or of a learner's node, the name of an environment server.
        source: directory of the weights that an engine starts with; where a learner's first node waits for others.
    """
    run = RunConfig.model_validate(config)
    require_proof(proof, run, service, member, source)
    os.environ[BIND] = address_of(run.placement.interface)
    flow_run = UUID(current_flow_run())
    directory = _log_directory(run, service, source) / f"{service}-{str(flow_run)[:8]}"
    with Supervisor(run.name, directory, on_pool=True) as supervisor:
        served = _service(supervisor, run, service, member, source)
        served.begin()
        return _serve_leased(served.handles, flow_run, run.placement.lease_seconds)


def _log_directory(run: RunConfig, service: str, source: str) -> Path:
    """Return where a service's logs go on this machine.

    Raises ServiceFailed where an engine or a learner has not the directories here by which weights come and go: a store
    would be made in an empty one, and what is trained would be written where nobody looks.
    """
    store = [] if is_object_store(run.store) else [Path(open_root(run.store).child(FORMAT))]
    missing = [path for path in (*store, *([Path(source)] if service == "engine" else [])) if not path.exists()]
    if not missing:
        return log_directory(run)
    if service == "environment":  # which needs neither
        return log_directory(run.model_copy(update={"store": ".stagecoach"}))
    raise ServiceFailed(
        f"this machine has no {missing[0]}, and the {service} has its weights there. Nothing was started: mount "
        "the file systems of store and model at the same paths on all machines of the pool"
    )


def _service(supervisor: Supervisor, run: RunConfig, service: str, member: str, source: str) -> RunService:
    """Return what serves here. When a process of it dies the flow run ends: its run asks for another."""
    if service == "engine":
        only = run.model_copy(update={"engine": run.engine.model_copy(update={"replicas": 1, "max_restarts": 0})})
        return InferenceService(supervisor, RunContext(open_store(run.store), run.name, only, {}), Path(source))
    if service == "learner":
        return LearnerNode(supervisor, run, int(member) - 1, source)
    (chosen,) = (entry for entry in run.served_environments.values() if member in entry.server_names)
    alone = chosen.model_copy(update={"max_restarts": 0, "servers": 1})
    evaluation = run.evaluation.model_copy(update={"environments": (), "sets": ()})
    only = run.model_copy(update={"kind": "evaluate", "environments": (alone,), "evaluation": evaluation})
    return EnvironmentServers(supervisor, only, shared_key(run, "engine"))


def _serve_leased(handles: Sequence[Handle], flow_run: UUID, lease_seconds: float) -> str | State[str]:
    """Say where the first process answers as soon as it does, and that all live; return why nobody needs them any more.

    A worker ends a cancelled flow run when it receives an event of it. It does not ask, so an event that is lost would
    leave the flow run in the state Cancelling, which has no other way out than Cancelled.

    Raises ServiceFailed where it ends by itself.
    """
    import httpx

    renewals, numbers = RenewalWatch(lease_seconds), itertools.count(1)
    answered_at, said, cancelled = time.monotonic(), -lease_seconds, 0
    where = {ADDRESS: "", PULSE: ""}
    with api_client() as client:
        while True:
            for handle in handles:
                if not handle.alive:
                    handle.wait()  # raises, with the end of its log
            ready = handles[0].ready_now() if not where[ADDRESS] else None
            try:
                if ready or time.monotonic() - said >= lease_seconds / BEATS_OF_A_LEASE:
                    if ready:
                        where = {ADDRESS: ready.get("url") or ready["address"], PULSE: ready.get("pulse", "")}
                    # All labels each time: the other side's may be written at the same moment, over an older state.
                    client.update_flow_run_labels(flow_run, {SEEN: next(numbers), **where})
                    said = time.monotonic()
                found = client.read_flow_run(flow_run)
                answered_at = time.monotonic()
                cancelled += found.state is not None and found.state.is_cancelling()
                if cancelled == CANCELLED_LOOKS:
                    return Cancelled(message="its run needs it no more, and its worker has not ended it")
                if not renewals.look((found.labels or {}).get(RENEWED)):
                    return f"its run has not renewed the lease for {lease_seconds:.0f} s"
            except httpx.HTTPError:  # Prefect may be away for a while; the run and its services go on
                if time.monotonic() - answered_at > AWAY_SECONDS:
                    raise ServiceFailed(f"Prefect has not answered for {AWAY_SECONDS:.0f} s") from None
            time.sleep(BEAT_SECONDS)

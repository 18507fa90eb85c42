"""What deployments need on a Prefect server: a work pool, a limit of GPU slots, an automation for lost runs."""

from datetime import UTC, datetime, timedelta
from typing import Any

AUTOMATION = "stagecoach: mark lost runs as crashed"
SILENCE = timedelta(minutes=10)
"""A run without a heartbeat for so long is lost. Runs of a command line send one every three minutes."""
FORGOTTEN = timedelta(minutes=3)
"""A slot that is taken although no run is alive, so long after the limit last changed, is freed by nobody else."""
MADE, THERE, UPDATED = "made", "was there", "updated"


def ensure_pool(name: str) -> str:
    """Make a work pool of processes unless one of that name, of any type, is there."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(WorkPoolCreate(name=name, type="process", description="Runs of Stagecoach"))
        except ObjectAlreadyExists:
            return THERE
    return MADE


def ensure_limit(name: str, slots: int) -> str:
    """Make the limit or set it. Slots that nobody can hold any more are given back.

    Prefect keeps in memory who holds a slot: a server that was killed with the run forgets it, and it stays taken.
    Otherwise the slot of a dead run is freed a minute later, and must not be given back twice.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            before = client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=slots, active=True))
            return f"{MADE}, {slots}"
        quiet = before.updated is not None and datetime.now(UTC) - before.updated > FORGOTTEN
        stuck = before.active_slots > 0 and quiet and not _alive(client)
        changed = {"limit": slots, "active": True} | ({"active_slots": 0} if stuck else {})
        client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(**changed))
    return f"{THERE}, {slots}" + (", a slot that nobody holds was given back" if stuck else "")


def _alive(client: Any) -> bool:
    """Tell whether any run of ours may be at work."""
    from prefect.client.schemas.filters import FlowRunFilter

    active = {
        "tags": {"all_": ["stagecoach"]},
        "state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING", "PAUSED"]}},
    }
    return bool(client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(active), limit=1))


def ensure_automation() -> str:
    """Make, or bring up to date, what marks a run as crashed whose heartbeat stopped without an end."""
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    ends = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed", "Paused")}
    wanted = AutomationCore(
        name=AUTOMATION,
        description="The process of such a run was killed, or its machine is gone. Its work is safe: retry the run.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *ends},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={"prefect.resource.id": "prefect.tag.stagecoach"},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=SILENCE,
        ),
        actions=[
            ChangeFlowRunState(
                state="CRASHED",
                message="No heartbeat for 10 minutes: the run's process or machine is gone. What is committed is safe; "
                "Retry goes on from there.",
            )
        ],
    )
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        there = client.read_automations_by_name(AUTOMATION)
        if there:
            client.update_automation(there[0].id, wanted)
            return UPDATED
        client.create_automation(wanted)
    return MADE

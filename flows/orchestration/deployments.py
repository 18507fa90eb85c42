"""Registers the deployments of `prefect.yaml` on a Prefect server, with work pool, limit, automation.

Imports Prefect, which reads its settings then: for the command `deploy` alone.
"""

from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.types.entrypoint import EntrypointType
from prefect.variables import Variable

from configs.layers import presets
from configs.store import default_store
from flows.orchestration import server as prefect_api
from flows.orchestration.deployment_file import DeploymentEntry, read
from flows.orchestration.events import EVENTS, POLICY
from flows.orchestration.gpu_slots import VARIABLE, variable_name
from flows.orchestration.server import one_line
from flows.orchestration.settings import POOL, DeployRefused, required_url
from flows.orchestration.states import mark_crashed
from storage.store import FORMAT, open_store
from tasks.inference.environments.packages import installed_tasksets

FILE = Path(__file__).with_name("prefect.yaml")


def main(pool: str = POOL, store: str = "", slots: int = 1, file: str = "", notify: str = "") -> int:
    """Deploy to the configured server and print what was done; return the exit status.

    `store` is the root that every deployment gets as its default, `slots` how many runs may have an engine or a learner
    at a time, `notify` a notification block of Prefect as type/name. Raises DeployRefused where no server is configured
    or the block is not there, PrefectUnreachable where the server does not answer.
    """
    url = required_url("nothing was deployed")
    prefect_api.probe(url)
    entries = read(Path(file) if file else FILE)
    limit = f"{pool}-gpu"
    print(f"Prefect server {url}")
    for name in prefect_api.crash_stale_runs(embedded=False):
        print(f"  flow run {name}: its process is gone, its state says how it ended")
    # Pool and limit before the deployments that name them: a schedule may fire at once.
    for name in sorted({pool, *(entry.pool(pool) for entry in entries)}):
        print(f"  work pool {name}: {ensure_pool(name)}")
    print(f"  GPU slots {variable_name(limit)}: {ensure_slots(limit, slots)}")
    print(f"  automation {AUTOMATION!r}: {ensure_automation(lost_runs_automation())}")
    for wanted in notifications(notify) if notify else ():
        print(f"  automation {wanted.name!r}: {ensure_automation(wanted)}")
    root = absolute(store or stored_default() or default_store())
    for entry in entries:
        print(f"  deployment {register(entry, pool, root, limit, slots)}")
    for name in lost_runs(root):
        print(f"  run {name} of the store: its process is gone, marked as crashed")
    print(f"Runs are kept in {root}. Next, on each machine:\n  prefect worker start --pool {pool}")
    return 0


def absolute(store: str) -> str:
    """Return a store's root as workers find it: a worker's runs begin in directories of their own."""
    return store if "://" in store else str(Path(store).expanduser().resolve())


def lost_runs(root: str) -> list[str]:
    """Mark runs of a store on this machine as crashed whose process is gone; return their names. Makes no store."""
    there = "://" not in root and Path(root, FORMAT).is_file()
    return mark_crashed(open_store(root)) if there else []


def register(entry: DeploymentEntry, pool: str, store: str, limit: str, slots: int) -> str:
    """Make or update one deployment; return its full name, and how many of its runs may have a process at a time."""
    module, _, name = entry.entrypoint.partition(":")
    flow = getattr(import_module(module), name)
    variables = dict(entry.work_pool.job_variables)
    # Each pool has slots of its own: machines of another pool have other GPUs.
    variables["env"] = {**variables.get("env", {}), VARIABLE: limit, "STAGECOACH_STORE": store}
    queue, at_a_time = entry.work_pool.work_queue_name, ""
    # Services of runs are as many as runs ask for; a file that says its own limit or queue is taken at its word.
    if entry.work_pool.name == POOL and queue is None and entry.concurrency_limit is None:
        queue = entry.name if entry.name == flow.name else f"{flow.name}-{entry.name}"
        at_a_time = f", {slots} at a time"
        ensure_queue(entry.pool(pool), queue, slots)
    deployment = flow.to_deployment(
        entry.name,
        **entry.model_dump(
            include={"description", "version", "tags", "parameters", "paused", "enforce_parameter_schema"}
        ),
        schedules=entry.all_schedules,
        concurrency_limit=entry.concurrency_limit,
        triggers=entry.triggers,
        work_pool_name=entry.pool(pool),
        work_queue_name=queue,
        job_variables=variables,
        # By module: workers import what is installed, and need no checkout.
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    _offer_choices(deployment._parameter_openapi_schema.properties, flow.name)
    deployment.apply()
    return f"{flow.name}/{entry.name}{at_a_time}"


def _offer_choices(properties: dict[str, Any], flow: str) -> None:
    """Let the form offer what there is here: presets of the flow's kind, and installed tasksets.

    The server refuses any other value, before there is a run. It is read where one deploys: the workers' machines are
    to have the same packages.
    """
    if "presets" in properties:
        properties["presets"]["items"]["enum"] = presets("sft" if flow == "sft" else "train")
    if "environment" in properties:
        properties["environment"]["enum"] = ["", *installed_tasksets()]


NOTIFIED_EVENTS = tuple(event for event in EVENTS if event != POLICY)
"""The events that are sent to a notification block."""
STORE_VARIABLE = "stagecoach_store"
"""Variable of Prefect that names the store of all deployments, where the command line names none."""
AUTOMATION = "stagecoach: mark lost runs as crashed"
SILENCE = timedelta(minutes=10)
"""A run without a heartbeat for so long is lost. Runs of a command line send one every three minutes."""
MADE, THERE, UPDATED = "made", "was there", "updated"


def ensure_pool(name: str) -> str:
    """Make a work pool of processes unless one of that name, of any type, is there."""
    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(WorkPoolCreate(name=name, type="process", description="Runs of Stagecoach"))
        except ObjectAlreadyExists:
            return THERE
    return MADE


def ensure_queue(pool: str, name: str, limit: int) -> None:
    """Make a work queue, or set how many of its flow runs may have a process at a time; others wait as scheduled.

    The server counts their states, so that it forgets nobody when it restarts. A limit of Prefect's on a deployment is
    a lease: its server ends a run that cannot renew it while the server restarts.
    """
    with get_client(sync_client=True) as client:
        try:
            client.create_work_queue(name, concurrency_limit=limit, work_pool_name=pool)
        except ObjectAlreadyExists:
            queue = client.read_work_queue_by_name(name, work_pool_name=pool)
            client.update_work_queue(queue.id, concurrency_limit=limit)


def ensure_slots(limit: str, slots: int) -> str:
    """Record how many runs may hold a GPU slot at a time; remove the limit of Prefect that earlier versions made."""
    name = variable_name(limit)
    before = Variable.get(name, default=None)
    Variable.set(name, {"slots": slots}, overwrite=True)
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        client.delete_global_concurrency_limit_by_name(limit)
    return f"{MADE if before is None else THERE}, {slots}"


def stored_default() -> str:
    """Return the store that the server's variable `stagecoach_store` names; empty where there is no such variable."""
    return str(Variable.get(STORE_VARIABLE, default="") or "")


def lost_runs_automation() -> Any:
    """Return the automation that marks a run as crashed whose heartbeat stopped without an end."""
    ends = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed", "Paused")}
    return AutomationCore(
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


def notifications(block: str) -> list[Any]:
    """Return the automations that send the messages of our events to a notification block, `type/name`.

    Raises DeployRefused where the server has no such block. Events of policies are left out: each step has one.
    """
    try:
        found: Any = Block.load(block, _sync=True)  # type: ignore[call-arg]
    except ValueError as problem:
        raise DeployRefused(
            f"--notify {block}: {one_line(problem)}. Nothing was deployed. Make the block on the page Blocks of "
            "Prefect, and name it as type/name, for example slack-webhook/ops"
        ) from problem
    # Templates of the server's: filled in with the event there.
    send = SendNotification(
        block_document_id=found._block_document_id, subject="{{ event.event }}", body="{{ event.payload.message }}"
    )
    return [
        AutomationCore(
            name=f"stagecoach: notify of {event}",
            description=f"Sends the message of each event {event} to the block {block}.",
            trigger=EventTrigger(expect={event}, posture=Posture.Reactive, threshold=1, within=timedelta(0)),
            actions=[send],
        )
        for event in NOTIFIED_EVENTS
    ]


def ensure_automation(wanted: Any) -> str:
    """Make an automation, or bring the one of its name up to date."""
    with get_client(sync_client=True) as client:
        there = client.read_automations_by_name(wanted.name)
        if there:
            client.update_automation(there[0].id, wanted)
            return UPDATED
        client.create_automation(wanted)
    return MADE

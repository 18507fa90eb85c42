"""Registers the deployments of `prefect.yaml` on a Prefect server, with work pool, limit, automation."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from configs.layers import presets
from configs.store import default_store
from flows.orchestration import server as prefect_api
from flows.orchestration.events import EVENTS, POLICY
from flows.orchestration.server import one_line
from flows.orchestration.settings import configured_url
from flows.orchestration.states import mark_crashed
from storage.store import FORMAT, open_store
from tasks.inference.environments.packages import installed_tasksets

FILE = Path(__file__).with_name("prefect.yaml")
POOL = "stagecoach"


class DeployRefused(ValueError):
    """Nothing was deployed, for a reason that the message names."""


def main(pool: str = POOL, store: str = "", slots: int = 1, file: str = "", notify: str = "") -> int:
    """Deploy to the configured server and print what was done; return the exit status.

    `store` is the root that every deployment gets as its default, `slots` how many runs may have an engine or a learner
    at a time, `notify` a notification block of Prefect as type/name. Raises DeployRefused where no server is configured
    or the block is not there, PrefectUnreachable where the server does not answer.
    """
    url = configured_url()
    if not url:
        raise DeployRefused(
            "no Prefect server is configured, nothing was deployed. Start one (prefect server start) and say where it "
            "is: export PREFECT_API_URL=http://127.0.0.1:4200/api"
        )
    prefect_api.probe(url)
    found = read(Path(file) if file else FILE)
    limit = f"{pool}-gpu"
    print(f"Prefect server {url}")
    for name in prefect_api.crash_stale_runs(embedded=False):
        print(f"  flow run {name}: its process is gone, its state says how it ended")
    # Pool and limit before the deployments that name them: a schedule may fire at once.
    for name in sorted({pool, *(pool_of(each, pool) for each in found)}):
        print(f"  work pool {name}: {ensure_pool(name)}")
    print(f"  limit {limit}: {ensure_limit(limit, slots)}")
    print(f"  automation {AUTOMATION!r}: {ensure_automation(lost_runs_automation())}")
    for wanted in notifications(notify) if notify else ():
        print(f"  automation {wanted.name!r}: {ensure_automation(wanted)}")
    root = absolute(store or stored_default() or default_store())
    for each in found:
        print(f"  deployment {register(each, pool, root, limit)}")
    for name in lost_runs(root):
        print(f"  run {name} of the store: its process is gone, marked as crashed")
    print(f"Runs are kept in {root}. Next, on each machine:\n  prefect worker start --pool {pool}")
    return 0


def read(file: Path) -> list[dict[str, Any]]:
    """Return the deployments that a file describes. Raises DeployRefused where it cannot be read."""
    try:
        return list(yaml.safe_load(file.read_text(encoding="utf-8"))["deployments"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise DeployRefused(
            f"{file} cannot be read as a file of deployments: {type(error).__name__}: {error}. Nothing was deployed. "
            f"Correct it, or leave --file out for the one that comes with the program"
        ) from error


def absolute(store: str) -> str:
    """Return a store's root as workers find it: a worker's runs begin in directories of their own."""
    return store if "://" in store else str(Path(store).expanduser().resolve())


def lost_runs(root: str) -> list[str]:
    """Mark runs of a store on this machine as crashed whose process is gone; return their names. Makes no store."""
    there = "://" not in root and Path(root, FORMAT).is_file()
    return mark_crashed(open_store(root)) if there else []


def pool_of(described: Mapping[str, Any], pool: str) -> str:
    """Return the work pool of a deployment: `pool` for runs, its own for services of runs."""
    own = str(described["work_pool"]["name"])
    return pool if own == POOL else own


def register(described: Mapping[str, Any], pool: str, store: str, limit: str) -> str:
    """Make or update one deployment; return its full name."""
    from prefect.schedules import Cron
    from prefect.types.entrypoint import EntrypointType

    module, _, name = described["entrypoint"].partition(":")
    flow = getattr(import_module(module), name)
    # Each pool has a limit of its own: machines of another pool have other GPUs.
    variables = described["work_pool"]["job_variables"]["env"] | {"STAGECOACH_GPU_LIMIT": limit}
    variables["STAGECOACH_STORE"] = store
    clocks = described.get("schedules", [])
    schedules = [(each["cron"], {name: each[name] for name in each if name != "cron"}) for each in clocks]
    deployment = flow.to_deployment(
        described["name"],
        description=described["description"],
        parameters=described["parameters"],
        tags=described["tags"],
        schedules=[Cron(cron, **others) for cron, others in schedules],
        work_pool_name=pool_of(described, pool),
        job_variables={"env": variables},
        # By module: workers import what is installed, and need no checkout.
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    _offer_choices(deployment._parameter_openapi_schema.properties, flow.name)
    deployment.apply()
    return f"{flow.name}/{described['name']}"


def require_services(names: Iterable[str]) -> None:
    """Raise DeployRefused where no Prefect server is configured, or it lacks a deployment that a run asks services of.

    Raises PrefectUnreachable where the server does not answer.
    """
    if not (url := configured_url()):
        raise DeployRefused(
            "placement.services is pools, and no Prefect server is configured. Nothing was started: say where it is, "
            "for example export PREFECT_API_URL=http://127.0.0.1:4200/api"
        )
    prefect_api.probe(url)
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        for name in names:
            try:
                client.read_deployment_by_name(name)
            except ObjectNotFound as problem:
                raise DeployRefused(
                    f"the Prefect server at {url} has no deployment {name}. Nothing was started: run `stagecoach "
                    "deploy`, and workers for the pools of services: prefect worker start --pool engines"
                ) from problem


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


def stored_default() -> str:
    """Return the store that the server's variable `stagecoach_store` names; empty where there is no such variable."""
    from prefect.variables import Variable

    return str(Variable.get(STORE_VARIABLE, default="") or "")


def lost_runs_automation() -> Any:
    """Return the automation that marks a run as crashed whose heartbeat stopped without an end."""
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

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
    from prefect.blocks.core import Block
    from prefect.events.actions import SendNotification
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

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
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        there = client.read_automations_by_name(wanted.name)
        if there:
            client.update_automation(there[0].id, wanted)
            return UPDATED
        client.create_automation(wanted)
    return MADE

"""Reads a file of deployments and registers them on a Prefect server, with work pool, limits, automation.

The file has the keys of Prefect's own. A key that this program does not take is refused by its name: a deployment
without it would not be the one described. Imports Prefect, which reads its settings then: for `deploy` alone.
"""

from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import yaml
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectAlreadyExists
from prefect.schedules import Schedule
from prefect.types.entrypoint import EntrypointType
from prefect.variables import Variable
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.store import default_store
from flows.orchestration import server as prefect_api
from flows.orchestration.gpu_slots import VARIABLE, variable_name
from flows.orchestration.settings import POOL, DeployRefused, required_url
from flows.orchestration.states import mark_crashed
from storage.store import FORMAT, open_store

FILE = Path(__file__).with_name("prefect.yaml")
LOST_RUNS = Path(__file__).with_name("lost_runs.yaml")


@dataclass(frozen=True)
class ScheduleEntry(Schedule):
    """One schedule, of one of three kinds: cron, interval in seconds, rrule."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        """Check what Prefect checks, and that the schedule has a kind."""
        super().__post_init__()
        if not (self.cron or self.interval or self.rrule):
            raise ValueError("a schedule has exactly one of cron, interval and rrule")


class WorkPoolEntry(BaseModel):
    """Where a deployment runs."""

    model_config = ConfigDict(extra="forbid")
    name: str = POOL
    work_queue_name: str | None = None
    job_variables: dict[str, Any] = {}


class DeploymentEntry(BaseModel):
    """One deployment; `prefect deploy` takes more keys."""

    model_config = ConfigDict(extra="forbid")
    name: str
    entrypoint: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    description: str | None = None
    tags: list[str] = []
    parameters: dict[str, Any] = {}
    schedules: list[ScheduleEntry] = []
    concurrency_limit: int | None = None
    work_pool: WorkPoolEntry = WorkPoolEntry()

    def pool(self, of_runs: str) -> str:
        """Return the work pool: `of_runs` for runs, the file's for services of runs."""
        return of_runs if self.work_pool.name == POOL else self.work_pool.name


class DeploymentFile(BaseModel):
    """A file of deployments; keys beside `deployments` are for `prefect deploy` alone."""

    deployments: list[DeploymentEntry]


def read(file: Path) -> list[DeploymentEntry]:
    """Return the deployments that a file describes. Raises DeployRefused where it cannot be read or deployed."""
    try:
        return DeploymentFile.model_validate(yaml.safe_load(file.read_text(encoding="utf-8"))).deployments
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise DeployRefused(
            f"{file} cannot be deployed: {type(error).__name__}: {error}\nNothing was deployed. Correct the file, or "
            "leave --file out for the one that comes with the program; `prefect deploy` takes more keys"
        ) from error


def main(pool: str = POOL, store: str = "", slots: int = 1, file: str = "") -> int:
    """Deploy to the configured server and print what was done; return the exit status.

    `store` is the root that every deployment gets as its default, `slots` how many runs may have an engine or a learner
    at a time. Raises DeployRefused where no server is configured, PrefectUnreachable where the server does not answer.
    """
    url = required_url("nothing was deployed")
    prefect_api.probe(url)
    entries = read(Path(file) if file else FILE)
    limit, root = f"{pool}-gpu", store or default_store()
    if is_local := "://" not in root:  # a worker's runs begin in directories of their own
        root = str(Path(root).expanduser().resolve())
    print(f"Prefect server {url}")
    for name in prefect_api.crash_stale_runs(embedded=False):
        print(f"  flow run {name}: its process is gone, its state says how it ended")
    # Pool and limit before the deployments that name them: a schedule may fire immediately.
    for name in sorted({pool, *(entry.pool(pool) for entry in entries)}):
        ensure_pool(name)
        print(f"  work pool {name}")
    Variable.set(variable_name(limit), {"slots": slots}, overwrite=True)
    print(f"  GPU slots {variable_name(limit)}: {slots}")
    print(f"  automation {ensure_automation(LOST_RUNS)!r}")
    for entry in entries:
        print(f"  deployment {register(entry, pool, root, limit, slots)}")
    # Makes no store.
    for name in mark_crashed(open_store(root)) if is_local and Path(root, FORMAT).is_file() else ():
        print(f"  run {name} of the store: its process is gone, marked as crashed")
    print(f"Runs are kept in {root}. Next, on each machine:\n  prefect worker start --pool {pool}")
    return 0


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
    flow.to_deployment(
        **entry.model_dump(include={"name", "description", "tags", "parameters", "concurrency_limit"}),
        schedules=[*entry.schedules],
        work_pool_name=entry.pool(pool),
        work_queue_name=queue,
        job_variables=variables,
        # By module: workers import what is installed, and need no checkout.
        entrypoint_type=EntrypointType.MODULE_PATH,
    ).apply()
    return f"{flow.name}/{entry.name}{at_a_time}"


def ensure_pool(name: str) -> None:
    """Make a work pool of processes unless one of that name, of any type, exists."""
    with prefect_api.api_client() as client, suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=name, type="process", description="Runs of Stagecoach"))


def ensure_queue(pool: str, name: str, limit: int) -> None:
    """Make a work queue, or set how many of its flow runs may have a process at a time; others wait as scheduled.

    The server counts their states, so that it forgets nobody when it restarts. A limit of Prefect's on a deployment is
    a lease: its server ends a run that cannot renew it while the server restarts.
    """
    with prefect_api.api_client() as client:
        try:
            client.create_work_queue(name, concurrency_limit=limit, work_pool_name=pool)
        except ObjectAlreadyExists:
            queue = client.read_work_queue_by_name(name, work_pool_name=pool)
            client.update_work_queue(queue.id, concurrency_limit=limit)


def ensure_automation(file: Path) -> str:
    """Make the automation that a file describes, or bring the one of its name up to date; return the name."""
    automation = AutomationCore.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    with prefect_api.api_client() as client:
        if stored := client.read_automations_by_name(automation.name):
            client.update_automation(stored[0].id, automation)
        else:
            client.create_automation(automation)
    return automation.name

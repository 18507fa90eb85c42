"""The file of deployments: the keys of Prefect's own file, checked before anything is deployed.

A key that this program does not take is refused by its name: a deployment without it would not be the one described.
"""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import yaml
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.events import DeploymentTriggerTypes
from prefect.schedules import Schedule
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from flows.orchestration.settings import POOL, DeployRefused


class ScheduleEntry(BaseModel):
    """One schedule, of one of three kinds: cron, interval in seconds, rrule."""

    model_config = ConfigDict(extra="forbid")
    cron: str | None = None
    interval: timedelta | None = None
    rrule: str | None = None
    timezone: str | None = None
    anchor_date: datetime | None = None
    day_or: bool | None = None
    active: bool | None = None
    parameters: dict[str, Any] | None = None
    slug: str | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> "ScheduleEntry":
        if sum(kind is not None for kind in (self.cron, self.interval, self.rrule)) != 1:
            raise ValueError("a schedule has exactly one of cron, interval and rrule")
        self.schedule()  # checks what a cron or an rrule says
        return self

    def schedule(self) -> Schedule:
        """Return Prefect's schedule."""
        return Schedule(**self.model_dump(exclude_none=True))


class WorkPoolEntry(BaseModel):
    """Where a deployment runs."""

    model_config = ConfigDict(extra="forbid")
    name: str = POOL
    work_queue_name: str | None = None
    job_variables: dict[str, Any] = {}


class DeploymentEntry(BaseModel):
    """One deployment."""

    model_config = ConfigDict(extra="forbid")
    name: str
    entrypoint: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    description: str | None = None
    version: str | None = None
    tags: list[str] = []
    parameters: dict[str, Any] = {}
    schedule: ScheduleEntry | None = None
    schedules: list[ScheduleEntry] = []
    paused: bool | None = None
    concurrency_limit: (
        Annotated[
            ConcurrencyLimitConfig,
            BeforeValidator(lambda value: {"limit": value} if isinstance(value, int) else value),
        ]
        | None
    ) = None
    enforce_parameter_schema: bool = True
    triggers: list[DeploymentTriggerTypes] = []
    work_pool: WorkPoolEntry = WorkPoolEntry()

    @property
    def all_schedules(self) -> list[Schedule]:
        """The schedules of both keys."""
        return [entry.schedule() for entry in (*([self.schedule] if self.schedule else []), *self.schedules)]

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
    except ValidationError as error:
        problem = "\n".join(f"  {'.'.join(map(str, item['loc']))}: {_reason(item)}" for item in error.errors())
    except (OSError, yaml.YAMLError) as error:
        problem = f"  {type(error).__name__}: {error}"
    raise DeployRefused(
        f"{file} cannot be deployed:\n{problem}\nNothing was deployed. Correct the file, or leave --file out for the "
        "one that comes with the program"
    )


def _reason(item: Any) -> str:
    if item["type"] != "extra_forbidden":
        return str(item["msg"])
    return "`stagecoach deploy` does not take this key; `prefect deploy` may"

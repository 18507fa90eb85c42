"""session_for: the session in which the flow of a deployment works, and the parameters that flows share.

A worker, a schedule or a program calls it. The run gets a name that a retry finds again, and the two are linked: the
flow run's tags name the run, its store and its process, and the run's events name the flow run. Imports Prefect: for
the modules of flows alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.errors import ConfigError
from configs.run import RunConfig
from configs.store import default_store
from flows.orchestration.run_flow import run_name
from flows.orchestration.server import api_client, bookkeeping_only, current_flow_run, run_tags
from flows.runtime.loop import Planner, plan_work
from flows.runtime.resolve_run import continued_run, resolve_run
from flows.runtime.run import open_run
from flows.runtime.session import Session, record_run
from storage.store import open_store

OF_A_PROCESS = ("run:", "store:", "process:")


class StoreParameters(BaseModel):
    """Rare parameters of a flow: Prefect's form has them behind *advanced*, and shows none before one asks for them."""

    model_config = ConfigDict(title="Advanced", extra="forbid", frozen=True)

    store: str = Field("", description="root of the store, s3://bucket/prefix or a directory; empty: the deployment's")

    @classmethod
    def of(cls, given: "StoreParameters | Mapping[str, Any] | None") -> Self:
        """Return what a flow was given, checked here: flows leave it to the config otherwise. Raises ConfigError."""
        try:
            return cls.model_validate(given or {})
        except ValidationError as error:
            wrong = [f"advanced.{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
            raise ConfigError(wrong) from error


class FileParameters(StoreParameters):
    """Rare parameters of a flow whose config comes of presets."""

    files: list[str] = Field([], description="TOML files on the worker, over the presets, later ones over earlier ones")


def session_for(
    kind: str, files: Sequence[str], overrides: Sequence[str], **settings: Any
) -> AbstractContextManager[Session]:
    """Return a context with the session of a run, which has the name that `settings` or the flow run give it."""
    name = settings.get("name") or run_name(kind)
    config = resolve_run(kind, files, overrides, **settings | {"name": name})
    if not settings.get("name"):
        _require_own(config)
    return session_of(config)


def _require_own(config: RunConfig) -> None:
    """Raise ConfigError where another flow run has made the run of this name."""
    runs = open_store(config.store).runs
    makers = {event.flow_run for event in runs.events(config.name)} if config.name in runs.names() else set()
    if makers and current_flow_run() not in makers:
        raise ConfigError(
            f"name: run {config.name!r} of {config.store} was made by another flow run, {', '.join(map(str, makers))}. "
            "Nothing was started and nothing is lost: give this one a name, or that name to continue the run"
        )


def continued_settings(kind: str, continue_run: str, layers: Sequence[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the `settings` of a flow that continues a recorded run by as many steps as they say.

    Raises ConfigError where they, or `layers` of presets and files, are of anything else than its steps and its store:
    a recorded run keeps its config.
    """
    others = {"presets": layers, **settings, "store": "", "steps": None}
    if refused := [name.partition(".")[0] for name, value in others.items() if value]:
        raise ConfigError(f"run {continue_run!r} keeps its recorded config; leave out {', '.join(refused)}")
    store = open_store(settings["store"] or default_store())
    name, steps = continued_run(store, kind, continue_run, settings["steps"], current_flow_run())
    return settings | {"name": name, "steps": steps}


@contextmanager
def session_of(config: RunConfig, plan: Planner = plan_work) -> Iterator[Session]:
    """Yield the session of a run, and record how the run went; `plan` returns every result of the run."""
    link(config)
    with open_run(config, plan) as session, record_run(session):
        yield session


def link(config: RunConfig) -> None:
    """Tag the flow run with its run, store and process; a retry takes the place of the earlier process."""
    flow_run_id = current_flow_run()
    if flow_run_id is None:
        return
    with bookkeeping_only("its run and store"), api_client() as client:
        record = client.read_flow_run(UUID(flow_run_id))
        # Tags of the earlier process would let others take this run for dead.
        tags = [tag for tag in record.tags if not tag.startswith(OF_A_PROCESS)]
        client.update_flow_run(record.id, tags=sorted({*tags, *run_tags(config.name, config.store)}))

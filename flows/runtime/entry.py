"""Gives a flow its session: the command line's, or a new one where a worker, a schedule or a program called the flow.

In the second case it gives the run a name that a retry finds again, and links the two: the flow run's tags name the
run, its store and its process, and the run's events name the flow run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from configs.run import RunConfig
from configs.services import TrackingSection
from flows.orchestration.server import bookkeeping_only, current_flow_run, run_tags
from flows.reporting.artifacts import ArtifactWatcher, RunArtifacts
from flows.reporting.tracking import TrackingWatcher, open_sink
from flows.runtime.loops import Planner, plan_work
from flows.runtime.preflight import preflight
from flows.runtime.prepare import prepare
from flows.runtime.session import Session, Watcher, current_session, log_directory, open_session, record_run
from storage.store import open_store

ID_CHARACTERS = 8
OF_A_PROCESS = ("run:", "store:", "process:")


def session_for(
    kind: str, files: Sequence[str], overrides: Sequence[str], **settings: Any
) -> AbstractContextManager[Session]:
    """Return a context with the session that is open around the flow, or a new one for files and overrides."""
    settings["name"] = settings.get("name") or run_name(kind)
    return session_of(partial(prepare, kind, files, overrides, **settings))


@contextmanager
def session_of(prepared: Callable[[], RunConfig], plan: Planner = plan_work) -> Iterator[Session]:
    """Yield the session that is open around the flow, or a new one; write down how the run went.

    `plan` says which results the run consists of, to start only the services that the missing ones need.
    """
    session = current_session()
    if session is not None:
        with record_run(session):
            yield session
        return
    config = prepared()
    link(config)
    # Watchers outlive the session: the end of a run is an event, too.
    with watching(config) as (watchers, notes), open_session(config, (*watchers, log_event)) as opened:
        missing = [ref for ref in plan(opened.context, opened.source, opened.policy) if ref.computed]
        # Before the run's first event: what is refused here was never started.
        preflight(opened, missing)
        opened.notify("prefect", url="")
        for text in notes:
            opened.notify("note", text=text)
        with record_run(opened):
            opened.begin(missing)
            yield opened


@contextmanager
def watching(config: RunConfig) -> Iterator[tuple[tuple[Watcher, ...], tuple[str, ...]]]:
    """Give what keeps artifacts and tracking of a run up to date, and what is to be said of it when the run begins."""
    artifacts = RunArtifacts(config.name, config.store, config.steps, enabled=config.prefect.artifacts)
    watcher = ArtifactWatcher(artifacts, config.steps)
    tracking = config.tracking
    known = isinstance(tracking, TrackingSection) and config.name in open_store(config.store).runs.names()
    with open_sink(config, log_directory(config), known) as sink:
        if sink is None or not isinstance(tracking, TrackingSection):
            yield (watcher,), ()
        else:
            yield (watcher, TrackingWatcher(sink, tracking)), (sink.where,)


def log_event(event: str, facts: Mapping[str, Any]) -> None:
    """Write a line about a finished step or a note into the flow run's logs."""
    if event == "step":
        reward, loss = facts.get("reward"), (facts.get("update") or {}).get("loss")
        told = [f"{name} {value:.3f}" for name, value in (("reward", reward), ("loss", loss)) if value is not None]
        seconds = sum(facts["seconds"].values())
        _logger().info("step %d: %s, %d tokens, %.1f s", facts["step"], ", ".join(told), facts["tokens"], seconds)
    if event == "note":
        _logger().warning("%s", facts["text"])


def run_name(kind: str) -> str:
    """Return a name for a run that was given none: the same for every retry of a flow run; empty outside of one."""
    flow_run = current_flow_run()
    # From the flow run's id, which a retry keeps: it goes on instead of beginning anew.
    return f"{kind}-{flow_run[:ID_CHARACTERS]}" if flow_run else ""


def flow_run_name(kind: str) -> Callable[[], str]:
    """Return what names the flow runs of a kind, after their run in the store."""

    def name() -> str:
        from prefect.runtime import flow_run

        given = (flow_run.parameters or {}).get("name")
        return f"{kind}-{given}" if given else run_name(kind)

    return name


def link(config: RunConfig) -> None:
    """Tag the flow run with its run, store and process; a retry takes the place of the earlier process."""
    flow_run = current_flow_run()
    if flow_run is None:
        return
    from prefect.client.orchestration import get_client

    with bookkeeping_only("its run and store"), get_client(sync_client=True) as client:
        # Tags of the earlier process would let others take this run for dead.
        kept = [tag for tag in client.read_flow_run(flow_run).tags if not tag.startswith(OF_A_PROCESS)]
        tags = sorted({*kept, *run_tags(config.name, config.store)})
        client.update_flow_run(flow_run, tags=tags)


def _logger() -> Any:
    from prefect.logging import get_run_logger

    return get_run_logger()

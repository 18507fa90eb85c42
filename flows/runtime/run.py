"""open_run: the only door into a run, for the command line, Prefect's flows and Python.

It plans the run of a resolved config, checks what would make the run fail later, starts the services that missing
results need, and gives the open session. Outside of a flow run it also starts, or finds, Prefect's API. The caller's
thread does all of it; services start in processes of their own.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from configs.run import RunConfig
from configs.services import TrackingSection
from flows.orchestration import server as prefect_api
from flows.orchestration.events import EventWatcher
from flows.orchestration.server import current_flow_run
from flows.orchestration.signals import termination_reported
from flows.orchestration.table_workers import table_workers
from flows.reporting.artifacts import RunArtifacts
from flows.reporting.messages import step_message
from flows.reporting.tracking import TrackingWatcher, open_sink
from flows.runtime.alerts import AlertWatcher
from flows.runtime.loop import Planner
from flows.runtime.preflight import preflight
from flows.runtime.session import Session, Watcher, log_directory, open_session


@contextmanager
def open_run(config: RunConfig, plan: Planner, watchers: tuple[Watcher, ...] = ()) -> Iterator[Session]:
    """Yield the session of a run, whose services run or start; `plan` returns every result of the run.

    A run whose results are all cached needs neither services nor Prefect. Raises what `preflight` raises, RunCancelled
    while it waits for a GPU, PrefectUnreachable and ServiceFailed.
    """
    recorders: list[Watcher] = (
        [RunArtifacts(config.name, config.store, config.steps)] if config.prefect.artifacts else []
    )
    recorders += LogWatcher(), EventWatcher(config.name, config.store)
    tracking = config.tracking
    # Watchers outlive the session: the end of a run is an event, too.
    with ExitStack() as started:
        sink = started.enter_context(open_sink(config, log_directory(config)))
        if sink is not None and isinstance(tracking, TrackingSection):
            recorders.append(TrackingWatcher(sink, tracking))
        if config.alerts:
            recorders.append(alerts := AlertWatcher(config))
            started.callback(alerts.close)
        session = started.enter_context(open_session(config, (*watchers, *recorders)))
        planned = plan(session.context, session.source, session.policy)
        session.task_runs.plan(planned)
        session.missing = [ref for ref in planned if ref.computed]
        session.notify("plan", missing=session.missing, num_pieces=len(planned))
        if sink is not None:
            session.notify("note", text=sink.where)
        if session.missing:
            preflight(session, session.missing)
        if current_flow_run():
            session.notify("prefect", url="")
            if session.missing:
                started.enter_context(table_workers(config.prefect))
            session.begin(session.missing)
        elif session.missing:
            _start_beside_prefect(session, started)
        yield session


def _start_beside_prefect(session: Session, started: ExitStack) -> None:
    """Start the services while Prefect's API starts, and wait for the API alone: both take long."""
    api = begin_prefect(session.config)
    if api.supervisor:
        started.enter_context(api.supervisor.subscribe(session.note_service))
    session.begin(session.missing)
    started.enter_context(termination_reported())
    session.notify("prefect", url=api.wait().ui_url)
    prefect_api.route_prefect_logs(log_directory(session.config) / "prefect.log")


def begin_prefect(config: RunConfig) -> prefect_api.PrefectApi:
    """Return the Prefect API of this process: the one that was begun before, the configured one, or a new one.

    Raises PrefectUnreachable where a configured one does not answer.
    """
    api = prefect_api.begin(log_directory(config).parent / "prefect", config.prefect.startup_seconds)
    return api if api.embedded else api.wait()


class LogWatcher:
    """Writes a line about each finished step, and notes, into the logs of the flow run."""

    def __init__(self) -> None:
        self._logger: Any = None
        """Of the flow run, once an event came from within it; threads that watch services know no flow run."""

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        """Log one event; those before the flow run are shown to whoever started it."""
        self._logger = self._logger or flow_logger()
        if self._logger is None:
            return
        if event == "step":
            self._logger.info("step %d: %s", facts["step"], step_message(facts))
        elif event == "note":
            self._logger.warning("%s", facts["text"])


def flow_logger() -> logging.LoggerAdapter[logging.Logger] | None:
    """Return the logger of the flow run around, also from within one of its tasks; None outside of one."""
    if current_flow_run() is None:
        return None
    from prefect.context import FlowRunContext
    from prefect.logging.loggers import flow_run_logger

    context = FlowRunContext.get()
    return flow_run_logger(context.flow_run, context.flow) if context and context.flow_run else None

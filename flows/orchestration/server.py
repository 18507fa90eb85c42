"""The Prefect API of a run: the one that the user configured, or an embedded server that goes with the process.

    api = prefect_api.begin(directory)   # before anything imports Prefect; returns in a fraction of a second
    ...                                  # start the other services meanwhile
    api.wait()                           # the API answers; runs of dead processes get the state of their end

The embedded server ends when the process does, after Prefect has sent its last logs and events: ended earlier, Prefect
would wait for it for most of a minute.
"""

import atexit
import logging
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from flows.orchestration import server_process as prefect_server
from flows.orchestration.settings import configured_url, embedded_settings, server_settings
from flows.services.base import Supervisor
from flows.services.ownership import boot_id, is_alive, recorded_identity
from flows.services.process import Handle, Report, ServiceSpec
from storage.errors import StoreError, write_problem
from storage.read.frames import existing_store

PROBE_SECONDS = 5.0
RETRY_SECONDS = 1.0
BIND_SECONDS = 30.0
HANG_SECONDS = 60.0
"""An embedded server that answers nothing for so long is ended and started again: a run sends its last state at its
end, and would wait for it."""
STALE_STATES = ("RUNNING", "PAUSED", "CANCELLING")


class PrefectUnreachable(ValueError):
    """The configured Prefect API does not answer, or something else answers in its place."""


class PrefectFailed(ValueError):
    """The Prefect API answers with an error where a run cannot begin without it."""


class PrefectApi:
    """The API of this process: its address, whether it is embedded, and how to wait for it."""

    def __init__(self, url: str, handle: Handle | None = None, supervisor: Supervisor | None = None) -> None:
        self.url = url
        self.embedded = handle is not None
        self.supervisor = supervisor
        """Of the embedded server."""
        self._handle = handle

    @property
    def ui_url(self) -> str:
        """Where to look at runs in a browser."""
        return self.url.removesuffix("/").removesuffix("/api")

    def wait(self) -> "PrefectApi":
        """Wait until the API answers, then mark runs of dead processes as crashed; return itself.

        Raises PrefectUnreachable for a configured API, ServiceFailed for the embedded one.
        """
        if self._handle is None:
            probe(self.url)
        else:
            import_module("prefect.client.orchestration")  # takes a second, and the server needs some more
            self._handle.wait()
        with bookkeeping_only("the end of dead processes"):  # they are judged again at the next start
            crash_stale_runs(embedded=self.embedded)
        return self


_embedded: PrefectApi | None = None
"""The server that this process has started: it lives as long as the process, so there is one."""


def begin(directory: Path, startup_seconds: float = 180.0) -> PrefectApi:
    """Choose the API and set this process's environment for it; start the embedded server if it is to be that.

    `directory` holds the server's database and log for all runs. Must come before Prefect is imported, except where
    the API is configured (a worker's process, say). Called again, it returns the server that it started before.
    """
    global _embedded
    if _embedded is not None:
        return _embedded
    if url := configured_url():
        return PrefectApi(url)
    assert "prefect" not in sys.modules, "server.begin comes before the first import of prefect"
    directory = Path(directory).absolute()
    supervisor = Supervisor("prefect", directory)
    atexit.register(_end, supervisor, directory)  # registered before Prefect's own, so called after them
    # Before the server starts: it inherits them; the URL follows when its port is known.
    os.environ |= embedded_settings(directory, "")
    handle = supervisor.__enter__().start(_server(directory, startup_seconds))
    api_url = f"{_bound_url(handle)}/api"
    os.environ |= embedded_settings(directory, api_url)
    # One for the process: Prefect reads its settings once, so a second server would be ignored.
    _embedded = PrefectApi(api_url, handle, supervisor)
    return _embedded


def can_begin() -> bool:
    """Return whether `begin` can give this process an API: one exists, or Prefect has not read its settings yet."""
    return _embedded is not None or bool(configured_url()) or "prefect" not in sys.modules


def is_shared() -> bool:
    """Return whether this process reports to a server that others use too, not to an embedded one or to none."""
    return _embedded is None and bool(configured_url())


def route_prefect_logs(log: Path) -> None:
    """Send what Prefect would print to a file instead; what it sends to its API stays as it is.

    Must be called after Prefect was imported and before a flow is called.
    """
    from prefect.logging.configuration import setup_logging
    from prefect.logging.handlers import PrefectConsoleHandler

    # What a handler cannot write, on a full disk or to an API that is silent, is not worth a traceback each time.
    logging.raiseExceptions = False
    setup_logging()
    log.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(log, encoding="utf-8", delay=True)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("stagecoach").setLevel(logging.INFO)  # how sampling went, say; the root keeps to warnings
    # What a task run's state says already; of every stage it would be a line, and a request to the API.
    logging.getLogger("prefect.task_runs").addFilter(is_news)
    for logger in [logging.root, *map(logging.getLogger, logging.root.manager.loggerDict)]:
        consoles = [handler for handler in logger.handlers if isinstance(handler, PrefectConsoleHandler)]
        for handler in consoles:
            logger.removeHandler(handler)
        if consoles:
            logger.addHandler(file)


def is_news(record: logging.LogRecord) -> bool:
    """Return whether a line of a task run's log says more than that it has ended well."""
    return not record.getMessage().startswith(("Finished in state Completed", "Finished in state Cached"))


@contextmanager
def needed_heartbeats() -> Iterator[None]:
    """Within the block flow runs send no heartbeats to an embedded server: it ends with them, and nobody misses them.

    Prefect waits up to a second for the thread that sends them, at the end of each flow run.
    """
    if is_shared():
        yield
        return
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


def current_flow_run() -> str | None:
    """Return the id of the flow run that this is called in; None outside of one.

    Does not import Prefect: without it no flow runs, and importing it settles its API.
    """
    if "prefect" not in sys.modules:
        return None
    from prefect.runtime import flow_run

    # Through Prefect's own context variable, so that it is right in threads and tasks, too.
    return str(flow_run.id) if flow_run.id else None


def api_client() -> Any:
    """Return a client of the Prefect API, for a `with` statement."""
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def flow_run_record() -> Any:
    """Return Prefect's record of the flow run around, as it was at its start; None outside of one. Asks no API."""
    if "prefect" not in sys.modules:
        return None
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    return context.flow_run if context else None


def run_tags(run_name: str, store: str = "") -> list[str]:
    """Return the tags of a flow run of this process: its run, its store, and what `crash_stale_runs` reads back."""
    process = f"process:{socket.gethostname()}/{recorded_identity()}"
    return ["stagecoach", f"run:{run_name}", *([f"store:{store}"] if store else []), process]


def tag_value(tags: Iterable[str], name: str) -> str:
    """Return what a tag `name:value` says; empty without one."""
    return next((tag.partition(":")[2] for tag in tags if tag.startswith(f"{name}:")), "")


def process_of(tags: Iterable[str]) -> tuple[str, str, str]:
    """Return host, boot and identity (`<pid>:<start time>`) of a tagged run's process; empty where no tag says."""
    host, _, process = tag_value(tags, "process").partition("/")
    boot, _, process = process.partition(":")
    return host, boot, process


def is_gone(tags: Iterable[str], embedded: bool) -> bool:
    """Return whether a run's process is certainly gone, by its tags.

    After a reboot of this host it is. But a shared API may know two machines of one name, so that only an embedded
    server's runs are judged by the boot.
    """
    host, boot, process = process_of(tags)
    if host != socket.gethostname():
        return False
    return embedded if boot != boot_id() else not is_alive(process)


def cancellation(flow_run_id: Any, attempts: int = 1) -> str | None:
    """Return a text where someone asked, in the UI or on the command line, that a flow run be cancelled, else "".

    The text has the reason, if one was given. Prefect does not end runs that no worker started: ask between stages.
    None where the API does not answer in any of the attempts; having no flow run says no.
    """
    if flow_run_id is None:
        return ""
    import httpx

    for attempt in range(attempts):
        time.sleep(RETRY_SECONDS if attempt else 0.0)
        try:
            with api_client() as client:
                state = client.read_flow_run(flow_run_id).state
        except httpx.HTTPError:
            continue  # the run's data do not depend on the API, so its life must not
        if state is None or not (state.is_cancelling() or state.is_cancelled()):
            return ""
        return "as Prefect was asked to" + (f": {state.message}" if state.message else "")
    return None


def request_cancellation(flow_run_id: Any, reason: str) -> None:
    """Ask Prefect to cancel a flow run, as a person does in the UI; `reason` is the message of its state."""
    from prefect.states import Cancelling

    with bookkeeping_only("a cancellation"), api_client() as client:
        client.set_flow_run_state(flow_run_id, Cancelling(message=reason))


def crash_stale_runs(embedded: bool) -> list[str]:
    """Give runs that say they run although their process is gone a state that ends them; return their names.

    A process that was killed cannot report its end, and one that ended while the API was silent could not.
    Runs of other hosts cannot be judged from here and are left alone.
    """
    from prefect.client.schemas.filters import FlowRunFilter

    # Of Stagecoach only: a shared server has runs of other programs.
    stale = {"tags": {"all_": ["stagecoach"]}, "state": {"type": {"any_": list(STALE_STATES)}}}
    names = []
    with api_client() as client:
        for run in client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(stale)):
            if is_gone(run.tags, embedded):
                client.set_flow_run_state(run.id, missed_state(run.tags, str(run.id)), force=True)
                names.append(run.name)
    return names


def missed_state(tags: Sequence[str], flow_run: str) -> Any:
    """Return the state of a flow run whose process is gone: its end as its store has it, else crashed."""
    from prefect import states

    run, store = tag_value(tags, "run"), tag_value(tags, "store")
    try:
        last = existing_store(store, read_only=True).runs.last(run) if run and store else None
    except StoreError:  # it may be another machine's, or removed
        last = None
    ends = {"finished": states.Completed, "cancelled": states.Cancelled, "failed": states.Failed}
    if last is None or last.flow_run != flow_run or last.event not in ends:
        return states.Crashed(message="The process of this run is gone.")
    return ends[last.event](message=last.message or None)


def one_line(problem: BaseException) -> str:
    """Return what an error says, on one line: those of Prefect's client add a request, a response and an address."""
    return f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"


@contextmanager
def bookkeeping_only(what: str) -> Iterator[None]:
    """Within the block, let an API that does not answer, or answers with an error, cost a line in the log alone."""
    import httpx

    try:
        yield
    except httpx.HTTPError as problem:
        logging.getLogger("stagecoach").warning("Prefect did not get %s: %s", what, one_line(problem))


def failure(problem: BaseException) -> PrefectFailed:
    """Return the error for a request that the API could not answer, with the reason where the disk is one."""
    url = _embedded.url if _embedded is not None else configured_url()
    unwritable = write_problem(Path(os.environ["PREFECT_HOME"])) if _embedded is not None else ""
    return PrefectFailed(
        f"the Prefect API at {url} failed: {one_line(problem)}{unwritable and f'; {unwritable}'}. Nothing was started, "
        "and what is in the store is safe: see to that and run the same again"
    )


def probe(url: str) -> None:
    """Ask the configured API for its health, with the user's credentials; raise PrefectUnreachable if it has none."""
    import httpx
    from prefect import settings
    from prefect.client.orchestration import SyncPrefectClient

    login = {"auth_string": settings.PREFECT_API_AUTH_STRING.value(), "api_key": settings.PREFECT_API_KEY.value()}
    try:
        # Asked once: with the client's retries a silent server would take a minute.
        with (
            settings.temporary_settings({settings.PREFECT_CLIENT_MAX_RETRIES: 0}),
            SyncPrefectClient(url, **login, httpx_settings={"timeout": PROBE_SECONDS}) as client,
        ):
            problem = client.api_healthcheck()
    except (httpx.InvalidURL, OSError, ValueError) as error:
        problem = error
    if problem is not None:
        raise PrefectUnreachable(
            f"no Prefect API answers at {url}: {one_line(problem)}. Nothing was started and nothing is lost: start "
            "that server or correct the URL (it ends in /api), or unset PREFECT_API_URL to have one started for the run"
        ) from problem


def _end(supervisor: Supervisor, directory: Path) -> None:
    """End the embedded server; of its files only the log stays, until the next start."""
    supervisor.close()
    for left in directory.glob(f"server-{os.getpid()}.[jps]*"):
        left.unlink()


def _server(directory: Path, startup_seconds: float) -> ServiceSpec:
    """Describe the embedded server of this process; several processes may share the directory."""
    name = f"server-{os.getpid()}"
    # Of processes that were killed; the names of the files say whose they are.
    for left in directory.glob("server-*.*"):
        if not Path("/proc", left.name.removeprefix("server-").partition(".")[0]).exists():
            left.unlink(missing_ok=True)
    report, port = directory / f"{name}.json", directory / f"{name}.port"
    port.unlink(missing_ok=True)
    return ServiceSpec(
        name="prefect",
        argv=[sys.executable, "-P", prefect_server.__file__, str(report), str(port)],
        env=server_settings(),
        report=report,
        log=directory / f"{name}.log",
        ready=_answers,
        hangs=_hangs,
        hang_seconds=HANG_SECONDS,
        startup_seconds=startup_seconds,
        max_restarts=5,
        grace_seconds=5.0,
        needs=("PREFECT_*",),
    )


def _answers(report: Report) -> bool:
    """Ask the embedded server for its health; a refused connection raises and means not yet."""
    import httpx

    url = f"{report['url']}/api/health"
    return httpx.get(url, timeout=PROBE_SECONDS, trust_env=False).raise_for_status().is_success  # through no proxy


def _hangs(report: Report) -> bool:
    """Return whether the embedded server answers nothing for HANG_SECONDS."""
    import httpx

    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        try:
            return not _answers(report)
        except httpx.HTTPError:  # refused, reset or timed out
            time.sleep(RETRY_SECONDS)
    return True


def _bound_url(handle: Handle) -> str:
    """Return the address that the server has bound, long before it answers."""
    deadline = time.monotonic() + BIND_SECONDS
    while (report := handle.read_report()) is None:
        if time.monotonic() > deadline or not handle.alive:
            return str(handle.wait()["url"])  # says what went wrong
        time.sleep(0.01)
    return str(report["url"])

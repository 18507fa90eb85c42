"""What all services of a run have in common: a supervisor that ends them, a start at first use, and a lock.

Services start side by side, each behind a guardian (`flows.services.guardian`) and with a log file of its own; a dead
or hanging one is started again a bounded number of times; a log that grows too large is moved aside; all are gone with
their whole process trees when the block ends or the flow dies. A service that someone else runs is adopted by its URL
and never started, watched or ended.
"""

import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Protocol
from uuid import UUID

from configs.run import RunConfig
from flows.services.logs import LogKeeper, NewLines
from flows.services.news import LogLines, ServiceNews
from flows.services.ownership import sweep
from flows.services.pools import STAND_IN_NEEDS, stand_in
from flows.services.process import LOOK_SECONDS, Handle, ServiceFailed, ServiceSpec
from storage.policies.scratch import ScratchDirectories
from storage.roots import user_directory

Command = tuple[Sequence[str], Mapping[str, str]]
"""A command line, and the variables that go with it."""


class Supervisor:
    """Owns the processes of one run: `with Supervisor(run_name, directory) as supervisor: ...`.

    When the block ends, in whatever way, no process of theirs is left, and no temporary file: an engine leaves sockets
    and more behind even when it is asked to end. On entry, processes and temporary files of flows that are gone are
    swept away. `directory` is for logs, which processes on one run share, and for reports, which they do not. With
    `tell_lines` the listeners receive every line of a log.
    """

    def __init__(self, run_name: str, directory: Path, tell_lines: bool = False, *, on_pool: bool = False) -> None:
        self.run_name = run_name
        self.on_pool = on_pool
        """Whether this is the machine of a pool on which a run has asked for its services."""
        self.directory = Path(directory)
        self._handles: list[Handle] = []
        self._new_lines: dict[str, NewLines] | None = {} if tell_lines else None
        # Not in `directory`, which may have a long name.
        temporary = temporary_directory()
        self._scratches = ScratchDirectories(temporary, private=temporary)
        self._temporary: Path | None = None
        self._others: list[tuple[ScratchDirectories, Path]] = []
        self._logs: LogKeeper | None = None
        self._listeners: list[Callable[[ServiceNews], None]] = []
        self._undelivered: list[ServiceNews] = []

    def __enter__(self) -> "Supervisor":
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.iterdir():
            if path.is_symlink():  # logs are appended to and emptied, which would befall what it points to
                raise ServiceFailed(f"{path} is a symbolic link where a log is to be. Nothing was started: remove it")
        # Before anything starts: an engine of a killed flow may still hold the memory.
        sweep()
        self._temporary = self._scratches.make("services")
        # A copy of the list: services are started while the keeper goes through it.
        self._logs = LogKeeper(
            lambda: [(handle.spec.log, handle.spec.log_bytes) for handle in list(self._handles)], self._tell_lines
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, spec: ServiceSpec) -> Handle:
        """Start a process, or adopt an external service; returns at once, see `Handle.wait`."""
        assert all(handle.spec.name != spec.name for handle in self._handles), f"two services named {spec.name!r}"
        if self._temporary is not None:
            spec = replace(spec, env={"TMPDIR": str(self._temporary), **spec.env})
        if self._new_lines is not None and not spec.external:
            self._new_lines[spec.name] = NewLines(spec.log, spec.env)
        handle = Handle(spec, self._tell)
        self._handles.append(handle)
        return handle

    @cached_property
    def reports(self) -> Path:
        """The directory of what services report, of this supervisor alone: others may be at work on the same run."""
        scratches = ScratchDirectories(self.directory / "reports")
        self._others.append((scratches, scratches.make("services")))
        return self._others[-1][1]

    def scratch_in(self, parent: Path) -> Path:
        """Return an empty directory below another, for as long as the services; a killed flow's is swept away."""
        private = user_directory(parent)
        scratches = ScratchDirectories(private, private=private)
        self._others.append((scratches, scratches.make("state")))
        return self._others[-1][1]

    @contextmanager
    def subscribe(self, listener: Callable[[ServiceNews], None]) -> Iterator[None]:
        """Within the block, call `listener` with all news of services, first with what no listener has received."""
        self._listeners.append(listener)
        undelivered, self._undelivered = self._undelivered, []
        for news in undelivered:
            listener(news)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def _tell_lines(self) -> None:
        for service, new in list((self._new_lines or {}).items()):
            if lines := new.take():
                self._tell(LogLines(service, lines))

    def _tell(self, news: ServiceNews) -> None:
        for listener in list(self._listeners):
            listener(news)
        if not self._listeners:
            self._undelivered.append(news)

    def close(self) -> None:
        """End all services, the last started first, and wait until none of their processes is left."""
        # The last started first: it may be a client of those before.
        handles = self._handles[::-1]
        # All are asked before one is waited for: their grace periods run side by side.
        for handle in handles:
            handle.ask_to_stop()
        for handle in handles:
            handle.join()
        if self._logs is not None:
            self._logs.close()
            self._logs = None
        self._handles = []
        if self._temporary is not None:
            self._scratches.discard(self._temporary)
            self._temporary = None
        for scratches, directory in self._others:
            scratches.discard(directory)
        self._others = []


SOCKET_CHARACTERS = 107
"""Longest path of a socket, which the kernel cuts there; engines make theirs where TMPDIR says."""
ROOM = len("/services-0123456789ab/") + len(str(UUID(int=0)))
"""What comes after the directory for services in the path of an engine's socket."""


def temporary_directory() -> Path:
    """Return where services of this user have their temporary files: in TMPDIR, or where that is too long beside it.

    Raises ServiceFailed where no place is short enough.
    """
    most = SOCKET_CHARACTERS - ROOM - len("/" + user_directory("").name)
    for place in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        if len(os.fsencode(place)) <= most and os.access(place, os.W_OK | os.X_OK):
            return user_directory(place)
    raise ServiceFailed(
        f"TMPDIR is {tempfile.gettempdir()!r}: sockets below it would have names of more than {SOCKET_CHARACTERS} "
        f"characters, and nothing can be written in /tmp. Nothing was started: set TMPDIR to a path of at most {most}"
    )


class RunService(ABC):
    """What stages ask for one kind of work: one process or several side by side, started early and waited for late."""

    keyword: ClassVar[str]
    """The keyword by which stages ask for it, a field of `tasks.runtime.services.Services`."""

    deployment: ClassVar[str] = ""
    """The deployment that serves it on a pool of Prefect's; empty where it runs on the run's own machine alone."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self._lock = threading.Lock()
        self._handles: dict[str, Handle] = {}

    @abstractmethod
    def begin(self) -> None:
        """Start the processes side by side, or adopt external ones; returns at once."""

    @abstractmethod
    def check_available(self) -> None:
        """Make sure, before a run begins, of what others provide: what they run, packages, weights. Starts nothing.

        Raises what says that it is not there.
        """

    @property
    def handles(self) -> list[Handle]:
        """The processes that were started."""
        return [*self._handles.values()]

    def _elsewhere(self, config: RunConfig) -> bool:
        """Tell whether processes that this run starts are to be flow runs on Prefect's pools, and it has stand-ins."""
        return config.placement.services == "pools" and not self.supervisor.on_pool

    def _process(self, name: str, describe: Callable[[], ServiceSpec]) -> Handle:
        """Return a process by its name, started at its first use; threads of the run may ask at the same time."""
        with self._lock:
            if name not in self._handles:
                self._handles[name] = self.supervisor.start(describe())
            return self._handles[name]

    def _describe(
        self,
        name: str,
        command: Callable[[Path], Command],
        ready: Callable[[dict[str, Any]], bool],
        limits: "Limits | None" = None,
        request: tuple[RunConfig, str, str, str] | None = None,
        external: str = "",
        needs: Collection[str] = (),
        **others: Any,
    ) -> ServiceSpec:
        """Describe a process that is named by its kind and which one it is.

        `command` makes the command line and its variables for the report, unless the process is `external` or a pool's:
        then `request` says by config, service, member and source what its stand-in asks for. `others` are further
        fields of ServiceSpec.
        """
        report = self.supervisor.reports / f"{name.replace(' ', '-', 1)}.json"
        started: Command = ([], {})
        if request and not external and self._elsewhere(request[0]):
            started, needs = (stand_in(*request, report), {}), STAND_IN_NEEDS
        elif not external:
            started = command(report)
        if limits:
            # A process that hangs is first to be noticed.
            startup = limits.startup_seconds + (0.0 if external else limits.hang_seconds)
            bounds = {"hang_seconds": limits.hang_seconds, "max_restarts": limits.max_restarts}
            others = {"startup_seconds": startup, **bounds, **others}
        log = self.supervisor.directory / report.with_suffix(".log").name
        return ServiceSpec(name, *started, report, log, ready, external=external, needs=needs, **others)


class Limits(Protocol):
    """The bounds in a service's section of the config."""

    @property
    def startup_seconds(self) -> float: ...
    @property
    def hang_seconds(self) -> float: ...
    @property
    def max_restarts(self) -> int: ...


def ready_reports(handles: Sequence[Handle]) -> list[dict[str, Any]]:
    """Return the reports of those processes of one kind that answer; waits for the first one where none does.

    Raises ServiceFailed where none is left.
    """
    if len(handles) == 1:
        return [handles[0].wait()]
    if ready := [report for each in handles if (report := each.ready_now())]:
        return ready
    ends = SimpleQueue[dict[str, Any] | ServiceFailed]()

    def wait(handle: Handle) -> None:
        try:
            ends.put(handle.wait())
        except ServiceFailed as failure:
            ends.put(failure)

    # Each is waited for to its end: one that was never seen to be ready would not be started again when it dies.
    for each in handles:
        threading.Thread(target=wait, args=(each,), name=f"wait for {each.spec.name}", daemon=True).start()
    failures = list[ServiceFailed]()
    while len(failures) < len(handles):
        with suppress(Empty):
            end = ends.get(timeout=LOOK_SECONDS)
            if not isinstance(end, ServiceFailed):
                return [end]
            failures.append(end)
    raise failures[-1]


class PolicyLock:
    """Shared by all who want the same policy; whoever wants another waits until nobody holds this one.

    Those who want the policy that is held are let in also while others wait for another: a policy is only asked for as
    long as its step, or its evaluation, goes on, so that all come to their turn. When nobody holds it any more, who has
    waited longest is next: an evaluation does not wait for ever behind sampling that goes from policy to policy.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._held = ""
        self._holders = 0
        self._waiting: list[str] = []
        """The policies that are waited for, in the order in which they were asked for."""

    @contextmanager
    def hold(self, policy_key: str) -> Iterator[None]:
        """Hold a policy within the block; waits for those who hold another, for ever if need be.

        Who holds one policy and asks for another within would wait for itself.
        """
        with self._free:
            self._waiting.append(policy_key)
            try:
                # Those who share the policy must not wait behind one who wants another.
                self._free.wait_for(lambda: policy_key == (self._held if self._holders else self._waiting[0]))
                self._held = policy_key
                self._holders += 1
            finally:
                self._waiting.remove(policy_key)
                self._free.notify_all()  # the first of those who wait may be another one now
        try:
            yield
        finally:
            with self._free:
                self._holders -= 1
                self._free.notify_all()

    def exchange(self, policy_key: str) -> bool:
        """Let the only holder hold another policy; False where there are others, or some wait for yet another one."""
        with self._free:
            assert self._holders, "nobody holds a policy"
            if self._holders > 1 or any(each != policy_key for each in self._waiting):
                return False
            self._held = policy_key
            self._free.notify_all()
            return True

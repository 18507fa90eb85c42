"""One child process of a run behind its guardian: started, watched, restarted, asked whether it is ready or hangs."""

import itertools
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.services import guardian
from flows.services.logs import HEADING, Variables, first_error, last_lines, secrets
from flows.services.ownership import OWNER, SERVICE, identity, kill_owned
from tasks.runtime.process_variables import inherited_variables, withheld

GRACE_SECONDS = 10.0
LOOK_SECONDS = 0.05
ASK_SECONDS = 5.0
"""Between two questions whether a service hangs."""
SLOW_SECONDS = 30.0
"""A start that takes so long is reported, and again after every so many seconds."""
Report = dict[str, Any]
"""What a service writes of itself: its address, and more."""
_numbers = itertools.count(1)
_guardians: weakref.WeakSet["subprocess.Popen[bytes]"] = weakref.WeakSet()
"""Each has a pipe as its input: when the write end is gone, by will or by death, so is the service."""


class ServiceFailed(ValueError):
    """A service did not start, or died more often than allowed: says what, where its log is and what to do."""


@dataclass(frozen=True)
class ServiceSpec:
    """How to start one service, or where to find one that someone else runs."""

    name: str
    """Name in logs and messages; also the name of its process mark."""
    argv: Sequence[str]
    """Command line; secrets never: they go through `env`."""
    env: Variables
    """Variables added to those of this process, of which secrets are left out: see `needs`."""
    report: Path
    """JSON file that the service writes once it knows its address."""
    log: Path
    """File that standard output and error are appended to; a large one moves to NAME.1."""
    ready: Callable[[Report], bool]
    """Asks the service, by its report, whether it is ready; what it raises counts as "not yet"."""
    startup_seconds: float = 180.0
    """Longest wait until it is ready."""
    max_restarts: int = 3
    """Restarts before the service counts as failed."""
    external: str = ""
    """URL of a service that someone else runs; the report is then {"url": URL, "address": URL}."""
    grace_seconds: float = GRACE_SECONDS
    """Time between the polite signal and the other one."""
    hangs: Callable[[Report], bool] | None = None
    """Asks a service that was ready, by its report, and says whether it is hanging; it is then started again."""
    hang_seconds: float = 0.0
    """How long `hangs` waits for an answer."""
    needs: Collection[str] = ()
    """Secrets among this process's variables that the service gets, by name or as `PREFIX_*`; it gets no others."""


class Handle:
    """One service of a supervisor: its reports, its readiness, its generations."""

    def __init__(self, spec: ServiceSpec, tell: Callable[..., None]) -> None:
        """Start the service or adopt it. `tell` gets its events as `Supervisor.subscribe` lists them."""
        self.spec = spec
        self.tell = tell
        self.generation = 0
        self.report: Report = {}
        """Of the present generation, once it was seen to be ready; empty before."""
        self.mark = f"{spec.name}#{next(_numbers)}"
        """The mark of the service's processes, unique within this process."""
        self._changed = threading.Condition()
        self._was_ready = False
        """Whether any generation was seen to be ready."""
        self._refusal: Exception | None = None
        """Why it said that it is not ready, when it was last asked."""
        self._launched_at, self._slow_at = 0.0, math.inf
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None
        self._stopped = threading.Event()
        self._failure = ""
        self._ended = ""
        """How the generation before this one ended; or why this one is being ended, where it was not by itself."""
        self._may_start = threading.Event()
        """Not set while one that dies is not to be restarted yet."""
        self._may_start.set()
        if not spec.external:
            for secret in secrets(spec.env):
                assert not any(secret in word for word in spec.argv), f"{spec.name}: a secret in the command line"
            self._launch()
            self._watcher = threading.Thread(target=self._watch, name=f"watch {spec.name}", daemon=True)
            self._watcher.start()
            if spec.hangs is not None:
                threading.Thread(target=self._watch_answers, name=f"ask {spec.name}", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the present generation's process runs; always true of an external service."""
        process = self._process
        return bool(self.spec.external) or (process is not None and process.poll() is None)

    def wait(self) -> Report:
        """Return the report once the service is ready; raise ServiceFailed when it failed or took too long."""
        deadline = time.monotonic() + self.spec.startup_seconds
        pause = LOOK_SECONDS
        waited = False
        while (report := self.ready_now()) is None:
            if self._failure:
                raise ServiceFailed(self._failure)
            if time.monotonic() >= deadline:
                raise ServiceFailed(self._too_late()) from self._refusal
            if not waited and not self.spec.external:
                self.tell("starting", service=self.spec.name)
            waited = True
            self._tell_if_slow()
            with self._changed:
                self._changed.wait(pause)  # less where the watcher starts it again, or gives it up
            # Often at first, as most services are up in a moment; an engine of minutes is not asked all the time.
            pause = min(pause * 1.3, 0.5)
        return report

    def ready_now(self) -> Report | None:
        """Return the report if the service answers at this moment; waits for nothing. Any refusal means "not yet"."""
        generation = self.generation  # read first: one that follows in between has not answered
        if self._failure or (report := self.read_report()) is None:
            return None
        self._refusal = None
        try:
            is_ready = self.spec.ready(report)
        except Exception as refusal:
            self._refusal = refusal
            return None
        with self._changed:
            # It may have died between its answer and now.
            if not is_ready or not self.alive or generation != self.generation:
                return None
            self.report, self._was_ready = report, True
        return report

    @contextmanager
    def not_restarted(self) -> Iterator[None]:
        """Start no other generation within the block: one that dies there is restarted after it."""
        self._may_start.clear()
        try:
            yield
        finally:
            self._may_start.set()

    def ask_to_stop(self) -> None:
        """Begin to end the service for good; returns at once."""
        with self._changed:
            self._stopped.set()
            self._failure = self._failure or f"service {self.spec.name!r} was stopped"
            self._may_start.set()  # the watcher then sees that it ends for good
            self._let_end()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until no process of the service is left; needs `ask_to_stop` before."""
        if self._process is None:
            return
        try:
            self._process.wait(self.spec.grace_seconds + 5.0)
        except subprocess.TimeoutExpired:
            # The guardian itself hangs; its children are found by their marks below.
            self._process.kill()
            self._process.wait()
        kill_owned(identity(), self.mark)  # what a killed guardian left
        if self._watcher is not None:
            self._watcher.join()

    def read_report(self) -> Report | None:
        """Return what the service reported, or None when it has not yet (a half-written file included)."""
        if self.spec.external:
            return {"url": self.spec.external, "address": self.spec.external}
        try:
            report = json.loads(self.spec.report.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return report if isinstance(report, dict) else None

    def _tell_if_slow(self) -> None:
        """Report that the service is still starting, once for all threads that wait for it."""
        now = time.monotonic()
        with self._changed:
            if now < self._slow_at:
                return
            self._slow_at = now + SLOW_SECONDS
        starting = f"still starting, {now - self._launched_at:.0f} s"
        self.tell("note", text=f"{self.spec.name}: {starting}; log: {self.spec.log}")

    def _launch(self) -> None:
        """Start the next generation behind a guardian, with a fresh report; returns at once.

        Raises OSError where the system refuses: a full disk, no process or memory left.
        """
        spec = self.spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        spec.report.parent.mkdir(parents=True, exist_ok=True)
        # Or the address of the generation before would be taken for this one's.
        spec.report.unlink(missing_ok=True)
        marks = {OWNER: identity(), SERVICE: self.mark, "SPT_NOENV": "1"}  # process titles must not overwrite marks
        since = f": the one before {self._ended}" if self._ended else ""
        without = f"; without {', '.join(hidden)}" if (hidden := withheld(spec.needs)) else ""
        heading = f"{HEADING}{spec.name}, generation {self.generation + 1}{since}{without}"
        variables = {**inherited_variables(spec.needs), **spec.env, **marks}
        # Only after a start that succeeded: a failed one leaves the old generation to be described.
        self._process = start_guarded(spec.argv, variables, spec.log, heading, spec.grace_seconds)
        self._ended, self.report = "", {}
        self._launched_at = time.monotonic()
        self._slow_at = self._launched_at + SLOW_SECONDS
        self.generation += 1

    def _let_end(self) -> None:
        """Let the present generation end, where there is one."""
        if self._process is not None:
            let_end(self._process)

    def _watch(self) -> None:
        """Sleep until the guardian ends; then start again, or give up; until stopped."""
        while True:
            assert self._process is not None
            status = self._process.wait()
            self._may_start.wait()
            with self._changed:
                self._let_end()
                if self._stopped.is_set():
                    return
                kill_owned(identity(), self.mark)  # when it was the guardian that was killed
                self._ended = how = self._ended or _how(status)
                # Under the lock, so that waiting threads see the new generation or the failure, never neither.
                self._failure = failure = self._start_again(status)
                self._changed.notify_all()
            restart = f"restart {self.generation - 1} of {self.spec.max_restarts}"
            # After the lock and the restart: a listener may take its time.
            text = f"{self.spec.name}: {how}; {'it is not started again' if failure else restart}; log: {self.spec.log}"
            self.tell("lost", service=self.spec.name, text=text)
            if failure:
                return

    def _start_again(self, status: int) -> str:
        """Start the next generation; return the message of failure, or nothing where it was started.

        A service that ends by itself before it was ever ready would do so again: a wrong path, a broken install. A
        signal is no such end: memory may have been short, and will not be the next time.
        """
        ended = f"service {self.spec.name!r} {self._ended}"
        if not self._was_ready and 0 <= status < 128:
            return self._describe(f"{ended} before it was ready", "correct what the log says and run the same again")
        if self.generation > self.spec.max_restarts:
            return self._describe(
                f"{ended} in generation {self.generation}: no restart of {self.spec.max_restarts} is left",
                "see the log for the cause (memory is a common one), then resume the run",
            )
        try:
            self._launch()
        except OSError as problem:
            what = f"{ended} and cannot be started again: {problem}"
            return self._describe(what, "see to what the system lacks, then resume the run")
        return ""

    def _watch_answers(self) -> None:
        """Ask again and again whether the service hangs, and restart one that does; until stopped.

        A question may take as long as it takes; listeners hear of one that takes long.
        """
        spec = self.spec
        assert spec.hangs is not None
        again = f"the run waits for it, and starts it again after {spec.hang_seconds:g} s without one"
        note = f"{spec.name}: no answer for {SLOW_SECONDS:.0f} s; {again}; log: {spec.log}"
        while not self._stopped.wait(ASK_SECONDS):
            generation = self.generation  # read first: one that follows in between is not restarted
            # A service that still loads weights answers nothing, and does not hang.
            if not (report := self.report):
                continue
            slow = threading.Timer(SLOW_SECONDS, self.tell, ["note"], {"text": note})
            slow.daemon = True
            slow.start()
            hangs = spec.hangs(report)
            slow.cancel()
            if hangs and not self._stopped.is_set():
                logging.getLogger(__name__).warning("service %r does not answer: it is started again", spec.name)
                with self._changed:
                    if generation == self.generation:
                        self._ended = "did not answer any more and was ended"
                        self._let_end()

    def _too_late(self) -> str:
        seconds = self.spec.startup_seconds
        said = f"; it last said: {type(self._refusal).__name__}: {self._refusal}" if self._refusal else ""
        if self.spec.external:
            return (
                f"service {self.spec.name!r} at {self.spec.external} is not ready after {seconds:g} s{said}. "
                "Nothing was started and nothing is lost: check that it runs and can be reached from here, "
                "or leave its address empty to have one started"
            )
        what = f"service {self.spec.name!r} was not ready after {seconds:g} s{said}"
        return self._describe(what, "see the log; on a slow or busy machine raise its startup_seconds")

    def _describe(self, what: str, advice: str) -> str:
        """Return a message for people: what, the end of the log without secrets, what is safe, what to do."""
        lines = last_lines(self.spec.log, self.spec.env)
        tail = "".join(f"\n  | {line}" for line in lines) or "\n  | (empty)"
        error = first_error(self.spec.log, self.spec.env)
        shown = not error or any(error in line for line in lines)
        cause = "" if shown else f"whose first error is\n  | {error}\nand "
        return f"{what}. What is in the store is safe: {advice}. Log: {self.spec.log}, {cause}which ends with{tail}"


def _how(status: int) -> str:
    if status < 0:
        return f"lost its guardian, which was killed by signal {-status}"
    return f"was killed by signal {status - 128}" if status > 128 else f"ended with status {status}"


def start_guarded(
    argv: Sequence[str], variables: Variables, log: Path, heading: str, grace_seconds: float
) -> "subprocess.Popen[bytes]":
    """Start a program; return its guardian, see `let_end`. Output is appended to `log`.

    `heading` is written to the log first, `variables` are its environment, and `grace_seconds` pass between the polite
    signal and the other one. Raises OSError where the system refuses: a full disk, no process left.
    """
    # Without site packages and the user's settings it is up in 20 ms.
    command = [sys.executable, "-I", "-S", guardian.__file__, str(grace_seconds)]
    with log.open("ab") as output:
        output.write(f"{heading}\n".encode())
        output.flush()
        process = subprocess.Popen(
            [*command, *argv],
            bufsize=0,
            env=dict(variables),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            # Ctrl-C at a terminal goes to the flow alone, which decides what it means.
            start_new_session=True,
        )
    _guardians.add(process)
    return process


def let_end(process: "subprocess.Popen[bytes]") -> None:
    """Let the service of a guardian end; calling it again does nothing."""
    assert process.stdin is not None
    process.stdin.close()


def _close_lifelines() -> None:
    """In a forked child: close the pipes, or the services would live as long as the child."""
    for process in list(_guardians):
        let_end(process)


os.register_at_fork(after_in_child=_close_lifelines)

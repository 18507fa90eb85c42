"""For how much of the time some components have neither computed nor waited for a core, looked at every few ms."""

import os
import threading
import time
from collections.abc import Collection
from pathlib import Path

import psutil

from benchmarks.breakdown.processor import component_of

INTERVAL_SECONDS = 0.004
LEAST_SHARE = 0.1
"""A component was at work between two looks if it was so for this share of the time."""


class AtWork:
    """Looks at the main threads of all processes of some components, which are this process's children."""

    def __init__(self, components: Collection[str]) -> None:
        children = psutil.Process().children(recursive=True)
        files = [Path(f"/proc/{each.pid}/schedstat") for each in children if component_of(each) in components]
        self._files = [os.open(path, os.O_RDONLY) for path in files]
        self._idle = self._all = 0.0
        self._lock = threading.Lock()
        threading.Thread(target=self._look, name="at work", daemon=True).start()

    def take_idle_share(self) -> float:
        """Return the share of the time since the last call in which no component was at work."""
        with self._lock:
            share = self._idle / self._all if self._all else 0.0
            self._idle = self._all = 0.0
        return share

    def _look(self) -> None:
        before, seen = time.perf_counter(), self._nanoseconds()
        while True:
            time.sleep(INTERVAL_SECONDS)
            try:
                now, found = time.perf_counter(), self._nanoseconds()
            except OSError:  # they end with the run
                return
            with self._lock:
                self._all += now - before
                self._idle += now - before if found - seen < LEAST_SHARE * 1e9 * (now - before) else 0.0
            before, seen = now, found

    def _nanoseconds(self) -> int:
        """Return for how long all of them have run, or waited for a core to run on."""
        texts = (os.pread(each, 100, 0).split() for each in self._files)
        return sum(int(running) + int(waiting) for running, waiting, *_ in texts)

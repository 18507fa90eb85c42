"""Opens one store to be read by many at once, and keeps what was read of it that can never change."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from configs.run import RunConfig
from flows.queries.cache import Cache
from flows.queries.outcomes import DERIVED
from flows.queries.recorded_run import recorded_run
from flows.queries.request import NotThere
from flows.queries.step_history import StepHistory
from storage.errors import RunUnknown
from storage.read.frames import Frames, existing_store
from storage.read.lineage import Graph
from storage.store import Store

Value = TypeVar("Value")


@dataclass(frozen=True)
class Moment:
    """A store as it was at one look."""

    mark: str
    """Another after every commit to the ledger, the events of runs or the quarantines."""
    frames: Frames
    runs: dict[str, Frames]
    histories: dict[str, StepHistory]


class StoreReader:
    """Answers questions about a store without ever writing to it. Safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = RLock()
        self._moment: Moment | None = None
        self._still: Moment | None = None
        self.cache = Cache()
        """What was derived of finished rows; shared by all that `still` returns."""

    @classmethod
    def at(cls, root: str | Path) -> "StoreReader":
        """Open the store at a root, a directory or a URL. Raises LayoutError where there is none; none is made."""
        return cls(existing_store(root, read_only=True))

    def still(self) -> "StoreReader":
        """The same library at this moment: all that one page reads is then of one look, whoever commits meanwhile."""
        found = copy(self)  # what is kept and the lock are shared
        found._still = self.moment()
        return found

    @property
    def mark(self) -> str:
        """A text that is another as soon as anything was committed."""
        if self._still is not None:
            return self._still.mark
        tables = (self.store.ledger, self.store.runs, self.store.quarantines)
        return "-".join(str(table.refresh()) for table in tables)

    def moment(self) -> Moment:
        """The store as it is now; the same object until somebody commits."""
        if self._still is not None:
            return self._still
        with self._lock:
            mark = self.mark  # before the reading: what is committed meanwhile is then seen as new
            if self._moment is None or self._moment.mark != mark:
                graph = Graph(self.store.ledger.entries())
                self._moment = Moment(mark, Frames(self.store, DERIVED, graph), {}, {})
            return self._moment

    def latest(self) -> str:
        """The run with the newest event. Raises NotThere in a store without runs."""
        found = self.store.runs.latest()
        if found is None:
            raise NotThere(f"there is no run in {self.store.root.address} yet: `stagecoach run` makes one")
        return found

    @property
    def graph(self) -> Graph:
        """All work of the store, by key."""
        return self.moment().frames.graph

    def frames(self, run: str = "") -> Frames:
        """The tables with the rows that a run uses, whoever computed them, or with all rows. Raises NotThere."""
        moment = self.moment()
        if not run:
            return moment.frames
        with self._lock:
            if run not in moment.runs:
                moment.runs[run] = self._of_run(moment, run)
            return moment.runs[run]

    def history(self, run: str) -> StepHistory:
        """Which work belongs to which step of a run, and what its rollouts went through. Raises NotThere."""
        self.frames(run)
        moment = self.moment()
        with self._lock:
            if run not in moment.histories:
                moment.histories[run] = StepHistory(moment.frames.graph, run)
            return moment.histories[run]

    def config(self, run: str) -> RunConfig:
        """The config that a run used last. Raises NotThere."""
        self.frames(run)
        return recorded_run(self.store, run)[1]

    def cached(self, name: Hashable, make: Callable[[], Value]) -> Value:
        """What `make` returns, made once: for what is derived from finished rows alone.

        `name` holds what names those rows (`storage.read.lineage.row_identities`): then nothing derived goes stale.
        """
        return self.cache.once(name, make)

    def held(self, name: Hashable) -> Any | None:
        """What `kept` has under a name; None where it would have to be made."""
        return self.cache.held(name)

    def cached_while(self, name: Hashable, state: Hashable, make: Callable[[], Value]) -> Value:
        """What `make` returns, made anew when `state` is another: for what of a run changes while it goes on."""
        return self.cache.while_same(name, state, make)

    def _of_run(self, moment: Moment, run: str) -> Frames:
        try:
            return moment.frames.run(run)
        except RunUnknown as error:
            raise NotThere(str(error)) from error


Name = TypeVar("Name", bound=Hashable)


def each_once(
    library: StoreReader, purpose: Hashable, names: Sequence[Name], read: Callable[[list[Name]], Mapping[Name, Value]]
) -> dict[Name, Value]:
    """Return what belongs to each name; `read` is asked once, for all names at once of which nothing is kept.

    Names hold what names the rows that the values are derived from (`storage.read.lineage.row_identities`). A name
    that `read` leaves out has no entry.
    """
    return library.cache.each_once(purpose, names, read)

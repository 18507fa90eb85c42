"""StoreReader: one store opened to be read by many threads at once, with what was read of finished work held.

Pages, commands and notebooks own one each. It never writes; all of it is safe to share between threads.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import polars as pl

from flows.queries.request import NotThere
from flows.queries.step_history import StepHistory
from flows.queries.views import relations
from storage.errors import RunUnknown
from storage.keys import canonical_json
from storage.read.frames import Frames, existing_store
from storage.read.lineage import Graph, Work
from storage.store import Store

if TYPE_CHECKING:
    from configs.run import RunConfig


def recorded_config(store: Store, name: str) -> "RunConfig | None":
    """Return the config that the run `name` used last; None where the store has no such run."""
    if not name or name not in store.runs.names():
        return None
    from configs.load import from_json  # as late as that: its sections take their time
    from configs.store_paths import absolute_paths

    # By the loader of config files: it fills in defaults and refuses what another version wrote.
    return absolute_paths(from_json(canonical_json(store.runs.config(name))), store.root.directory)


def recorded_run(store: Store, name: str) -> "tuple[str, RunConfig]":
    """Return the name and config of a recorded run, `latest` for the newest. Raises RunUnknown otherwise."""
    run = store.runs.latest() if name == "latest" else name
    config = recorded_config(store, run or "")
    if run is None or config is None:
        raise store.runs.unknown(name)
    return run, config


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a config by dotted key."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    if not isinstance(value, (Mapping, list)):
        yield key, value
    for name, item in items:
        yield from flat(item, f"{key}.{name}" if key else str(name))


# A viewer often runs on the machine that trains: what it holds stays small beside a model.
MAX_BYTES = 512 * 2**20
SMALL, PER_CHARACTER, PER_ENTRY = 1024, 5, 200
"""Bytes of each value in addition, of a character of its text, and of an entry where it is a dict of numbers."""
Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")


class Cache:
    """Values by name; the one that was not requested for longest goes first when there is no room.

    Names hold what names the rows that values are derived from (`storage.read.lineage.row_identities`). Without
    `most_bytes` all values stay, and nothing is weighed: for a process that answers one query and ends.
    """

    def __init__(self, most_bytes: int | None = MAX_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.num_bytes = 0
        """The weight of all values, each as it was when it came: values are not changed while they are held."""

    def peek(self, name: Hashable) -> Any | None:
        """Return what is held under a name; None where there is nothing."""
        with self._lock:
            if name in self._values:
                self._values.move_to_end(name)
            return self._values.get(name, (None, 0))[0]

    def put(self, name: Hashable, value: Value) -> Value:
        """Hold a value under a name, in place of what is held there, and return it."""
        # Outside the lock: it may take a while.
        weight = 0 if self._most_bytes is None else size_in_bytes(value)
        with self._lock:
            self.num_bytes += weight - self._values.pop(name, (None, 0))[1]
            self._values[name] = value, weight
            # The newest stays even where it alone is too large: it was requested just now.
            while self._most_bytes is not None and self.num_bytes > self._most_bytes and len(self._values) > 1:
                self.num_bytes -= self._values.popitem(last=False)[1][1]
        return value

    def once(self, name: Hashable, make: Callable[[], Value]) -> Value:
        """Return what `make` returns, made once while there is room; two threads at the same time may both make it."""
        held: Value | None = self.peek(name)
        return self.put(name, make()) if held is None else held

    def each_once(
        self, purpose: Hashable, names: Sequence[Name], read: Callable[[list[Name]], Mapping[Name, Value]]
    ) -> dict[Name, Value]:
        """Return what belongs to each name; `read` is called once, for all names at once of which nothing is held.

        A name that `read` leaves out has no entry.
        """
        held = {name: self.peek((purpose, name)) for name in names}
        missing = [name for name, value in held.items() if value is None]
        values = read(missing) if missing else {}
        held |= {name: self.put((purpose, name), value) for name, value in values.items()}
        return {name: value for name, value in held.items() if value is not None}


def size_in_bytes(value: Any) -> int:
    """Return about how many bytes a value takes: tables as they say, dicts of numbers, records by field, else text."""
    if isinstance(value, (pl.DataFrame, pl.Series)):
        return SMALL + int(value.estimated_size())
    if isinstance(value, dict) and all(isinstance(entry, (int, float)) for entry in value.values()):
        return SMALL + PER_ENTRY * len(value)
    if num_bytes := getattr(value, "nbytes", None):
        return SMALL + int(num_bytes)
    parts = value if isinstance(value, tuple) else vars(value).values() if hasattr(value, "__dict__") else None
    return SMALL + PER_CHARACTER * len(repr(value)) if parts is None else sum(map(size_in_bytes, parts))


class Moment(NamedTuple):
    """A store as it was at one look."""

    mark: str
    """Another after every commit to the ledger, the events of runs, the quarantines or the notes."""
    frames: Frames
    of_run: Callable[[str], Frames]
    history: Callable[[str], StepHistory]


class StoreReader:
    """Answers questions about a store without ever writing to it. Safe to share between threads."""

    def __init__(self, store: Store, cache: Cache | None = None) -> None:
        self.store = store
        self._lock = RLock()
        self._moment: Moment | None = None
        self._is_still = False
        self.cache = cache or Cache()
        """What was derived of finished rows; shared by all that `still` returns."""

    @classmethod
    def at(cls, root: str | Path, most_bytes: int | None = MAX_BYTES) -> "StoreReader":
        """Open the store at a root, a directory or a URL. Raises LayoutError where there is none; none is made."""
        return cls(existing_store(root, read_only=True), Cache(most_bytes))

    def still(self) -> "StoreReader":
        """The same store at this moment: all that one page reads is then of one look, whoever commits meanwhile."""
        self.moment()
        reader = copy(self)  # the cache is shared
        reader._is_still = True
        return reader

    @property
    def mark(self) -> str:
        """A text that is another as soon as anything was committed."""
        if self._is_still and self._moment:
            return self._moment.mark
        tables = (self.store.ledger, self.store.runs, self.store.quarantines, self.store.notes)
        return "-".join(str(table.refresh()) for table in tables)

    def moment(self) -> Moment:
        """The store as it is now; the same object until somebody commits."""
        with self._lock:
            mark = self.mark  # before the reading: what is committed meanwhile is then seen as new
            if self._moment is None or self._moment.mark != mark:
                graph = Graph(self.store.counted_entries())
                frames = Frames(self.store, relations, graph)
                histories = cache(lambda run: StepHistory(graph, run))
                self._moment = Moment(mark, frames, cache(frames.run), histories)
            return self._moment

    def latest(self) -> str:
        """The run with the newest event. Raises NotThere in a store without runs."""
        if (run := self.store.runs.latest()) is None:
            raise NotThere(f"there is no run in {self.store.root.address} yet: `stagecoach run` makes one")
        return run

    @property
    def graph(self) -> Graph:
        """All work of the store, by key."""
        return self.moment().frames.graph

    def frames(self, run: str = "") -> Frames:
        """The tables with the rows that a run uses, whoever computed them, or with all rows. Raises NotThere."""
        moment = self.moment()
        try:
            return moment.of_run(run) if run else moment.frames
        except RunUnknown as error:
            raise NotThere(str(error)) from error

    def history(self, run: str) -> StepHistory:
        """Which work belongs to which step of a run, and what its rollouts went through. Raises NotThere."""
        self.frames(run)
        return self.moment().history(run)

    def config(self, run: str) -> "RunConfig":
        """The config that a run used last. Raises NotThere."""
        self.frames(run)
        return recorded_run(self.store, run)[1]


def expired_rows(reader: StoreReader, works: Iterable[Work | None]) -> list[dict[str, Any]]:
    """Return what some work has lost, by table: table, num_rows, `at` (the last time) and hours (its retention then).

    Numbers that come from those tables are of the rows that are left.
    """
    pieces = list({piece for work in works if work is not None for piece in work.slices})
    # A slice may lose rows several times: in order of time, the last one says when and by which retention.
    losses = sorted(reader.store.slices.expired_slices.find(pieces), key=attrgetter("table", "at"))
    return [
        {"table": table, "num_rows": sum(loss.rows for loss in own), "at": own[-1].at, "hours": own[-1].hours}
        for table, own in ((table, [*own]) for table, own in groupby(losses, attrgetter("table")))
    ]


def expired_rows_of_runs(reader: StoreReader, *runs: str) -> list[dict[str, Any]]:
    """Return the same of all work that some runs use. Raises NotThere for an unknown run."""
    return expired_rows(reader, (work for run in runs for work in reader.frames(run).graph.works.values()))


def has_lost_rows(reader: StoreReader, works: Iterable[Work], table: str) -> bool:
    """Return whether any rows that some work made of a table were dropped."""
    return any(lost["table"] == table for lost in expired_rows(reader, works))

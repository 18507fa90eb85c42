"""Opens one store to be read by many at once, and keeps what was read of it that can never change.

The cache holds what was derived of finished work, within a bound. All of it is safe to share between threads.
"""

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa

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
MOST_BYTES = 512 * 2**20
SMALL = 1024
"""Bytes that anything which is kept counts for in addition: its name and its place."""
Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")


class Cache:
    """Values by name; the one that was not requested for longest goes first when there is no room.

    Without `most_bytes` all of them stay, and nothing is weighed: for a process that answers one query and ends.
    """

    def __init__(self, most_bytes: int | None = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.num_bytes = 0
        """The weight of all values, each as it was when it came: values are not changed while they are held."""

    def once(self, name: Hashable, make: Callable[[], Value]) -> Value:
        """Return what `make` returns, made once while there is room; two threads at the same time may both make it.

        `name` holds what names the rows that it is derived from (`storage.read.lineage.row_identities`).
        """
        held = self._entry(name)
        # Outside the lock: what takes long would hold up every other thread. At worst two of them make the same.
        value: Value = held[0] if held else self.put(name, make())
        return value

    def peek(self, name: Hashable) -> Any | None:
        """Return what is held under a name; None where there is nothing."""
        held = self._entry(name)
        return held[0] if held else None

    def _entry(self, name: Hashable) -> tuple[Any, int] | None:
        with self._lock:
            if name in self._values:
                self._values.move_to_end(name)
            return self._values.get(name)

    def put(self, name: Hashable, value: Value, num_bytes: int | None = None) -> Value:
        """Hold a value under a name, in place of what is held there, and return it; it is weighed without a weight."""
        weight = self._weigh(value) if num_bytes is None else num_bytes  # outside the lock: it may take a while
        with self._lock:
            self.num_bytes += weight - self._values.pop(name, (None, 0))[1]
            self._values[name] = value, weight
            # The newest stays even where it alone is too large: it was requested just now.
            while self._most_bytes is not None and self.num_bytes > self._most_bytes and len(self._values) > 1:
                self.num_bytes -= self._values.popitem(last=False)[1][1]
        return value

    def _weigh(self, value: Any) -> int:
        return 0 if self._most_bytes is None else size_in_bytes(value)

    def each_once(
        self, purpose: Hashable, names: Sequence[Name], read: Callable[[list[Name]], Mapping[Name, Value]]
    ) -> dict[Name, Value]:
        """Return what belongs to each name; `read` is called once, for all names at once of which nothing is held.

        Names hold what names the rows that the values are derived from (`storage.read.lineage.row_identities`). A name
        that `read` leaves out has no entry.
        """
        held = {name: self.peek((purpose, name)) for name in names}
        missing = [name for name, value in held.items() if value is None]
        values = read(missing) if missing else {}
        weighed = list(values.values())[:: -(-len(values) // MOST_ITEMS) or 1]
        weight = sum(map(self._weigh, weighed)) // len(weighed) if weighed else 0
        for name, value in values.items():
            held[name] = self.put((purpose, name), value, weight)
        return {name: value for name, value in held.items() if value is not None}

    def while_same(self, name: Hashable, state: Hashable, make: Callable[[], Value]) -> Value:
        """Return what `make` returns, made again when `state` is another; what was made before is let go.

        A run that goes on has another state after each piece of work: all of them would fill the memory.
        """
        held: tuple[Hashable, Value] | None = self.peek(name)
        if held is None or held[0] != state:
            held = self.put(name, (state, make()))
        return held[1]


MOST_ITEMS = 32
"""Items of a long list or dictionary that are looked at, evenly spread; the others are taken to be like them."""
_TABLES = (pa.Table, pa.RecordBatch, pa.Array, pa.ChunkedArray, np.ndarray)
_ATOMS = (str, bytes, bytearray, int, float, complex, type)


def size_in_bytes(value: Any) -> int:
    """Return about how many bytes something takes: tables as they say, all else with what it holds, however deep.

    What is held twice in it counts once. Of long lists and dictionaries some items alone are weighed.
    """
    # By identity, for equal things may be apart; a list of what waits, for values may lie deeper than Python's stack.
    seen: set[int] = set()
    total, waiting = 0.0, [(value, 1.0)]
    while waiting:
        each, times = waiting.pop()
        if each is None or isinstance(each, bool) or id(each) in seen:
            continue
        seen.add(id(each))
        total += times * _own_bytes(each)
        waiting += [(item, times * like) for item, like in _items(each)]
    return SMALL + round(total)


def _own_bytes(value: Any) -> int:
    if isinstance(value, (pl.DataFrame, pl.Series)):
        return int(value.estimated_size())
    return int(value.nbytes) if isinstance(value, _TABLES) else sys.getsizeof(value)


def _items(value: Any) -> Iterator[tuple[Any, float]]:
    """Yield what a value holds, and for how many items like it each stands."""
    if isinstance(value, (pl.DataFrame, pl.Series, *_TABLES, *_ATOMS)):
        return
    if isinstance(value, (Mapping, Sequence, set, frozenset)):
        apart = -(-len(value) // MOST_ITEMS) or 1
        like = len(value) / -(-len(value) // apart) if value else 1.0
        for items in (value.keys(), value.values()) if isinstance(value, Mapping) else (value,):
            yield from ((item, like) for item in islice(items, 0, None, apart))
        return
    # Each class that an object comes of may have added slots of its own.
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    yield getattr(value, "__dict__", None), 1.0
    yield from ((getattr(value, name, None), 1.0) for name in slots)


@dataclass(frozen=True)
class Moment:
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
        self._still: Moment | None = None
        self.cache = cache or Cache()
        """What was derived of finished rows; shared by all that `still` returns."""

    @classmethod
    def at(cls, root: str | Path, most_bytes: int | None = MOST_BYTES) -> "StoreReader":
        """Open the store at a root, a directory or a URL. Raises LayoutError where there is none; none is made."""
        return cls(existing_store(root, read_only=True), Cache(most_bytes))

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
        tables = (self.store.ledger, self.store.runs, self.store.quarantines, self.store.notes)
        return "-".join(str(table.refresh()) for table in tables)

    def moment(self) -> Moment:
        """The store as it is now; the same object until somebody commits."""
        if self._still is not None:
            return self._still
        with self._lock:
            mark = self.mark  # before the reading: what is committed meanwhile is then seen as new
            if self._moment is None or self._moment.mark != mark:
                graph = Graph(self.store.counted_entries())
                frames = Frames(self.store, relations, graph)
                self._moment = Moment(
                    mark, frames, functools.cache(frames.run), functools.cache(partial(StepHistory, graph))
                )
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
    pieces = {piece for work in works if work is not None for piece in work.slices}
    summaries: dict[str, dict[str, Any]] = {}
    # A slice may lose rows several times: in order of time, the last one says when and by which retention.
    for loss in sorted(reader.store.slices.expired_slices.find([*pieces]), key=lambda loss: (loss.table, loss.at)):
        num_rows = summaries.get(loss.table, {"num_rows": 0})["num_rows"] + loss.rows
        summaries[loss.table] = {"table": loss.table, "num_rows": num_rows, "at": loss.at, "hours": loss.hours}
    return list(summaries.values())


def expired_rows_of_runs(reader: StoreReader, *runs: str) -> list[dict[str, Any]]:
    """Return the same of all work that some runs use. Raises NotThere for an unknown run."""
    return expired_rows(reader, (work for run in runs for work in reader.frames(run).graph.works.values()))


def has_lost_rows(reader: StoreReader, works: Iterable[Work], table: str) -> bool:
    """Say whether any rows that some work made of a table were dropped."""
    pieces = [piece for work in works for piece in work.slices_of(table)]
    return bool(reader.store.slices.expired_slices.find(pieces))

"""What two runs recorded, read once to be compared: rows of a step are held by what names them."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import pyarrow as pa

from configs.run import RunConfig
from flows.runtime.scores import READ, EvaluationScores, RecordedEvaluation, score_rollouts
from flows.viewer.data.shared_reads import each_once
from flows.viewer.library import Library
from flows.views.differences import Reading
from flows.views.recorded_rows import Made, arrow, made
from storage.read.lineage import marks
from storage.refs import Entry
from storage.schemas.stage_tables import TRACES

Name = tuple[tuple[str, ...], ...]
"""The work of a step: its stages, each with what names its rows."""
Value = TypeVar("Value")


class KeptReading(Reading):
    """Reads as `stagecoach diff` does, and holds what it read by what names the rows."""

    def __init__(self, library: Library) -> None:
        super().__init__(library.store)
        self._library = library

    def made(self, works: Sequence[Mapping[str, Entry]]) -> list[Made]:
        """Return the rows that works, entries by stage, have made; those that share all their work share the rows."""
        named = {_name(work): work for work in works}

        def read(names: list[Name]) -> dict[Name, Made]:
            return dict(zip(names, made(self.store, [named[name] for name in names]), strict=True))

        found = each_once(self._library, ("compared rows",), list(named), read)
        return [found[_name(work)] for work in works]

    def scored(self, recorded: RecordedEvaluation, config: RunConfig) -> EvaluationScores:
        """Return what the rollouts of an evaluation say; of its traces only the columns that scores need are read."""
        rounds = marks(recorded.rounds)
        environments = tuple(each.model_dump_json() for each in config.environments)
        name = ("scored", recorded.set_name, recorded.version, recorded.pass_at, rounds, environments)
        return self._library.kept(name, lambda: self._scored(recorded, config))

    def _scored(self, recorded: RecordedEvaluation, config: RunConfig) -> EvaluationScores:
        rounds = [self._traces(entry) for entry in recorded.rounds]
        return score_rollouts(recorded.set_name, recorded.version, rounds, config.environments, recorded.pass_at)

    def _traces(self, entry: Entry) -> pa.Table:
        """Return the rollouts of one round, slice after slice in the order in which they were handed over.

        The slices stay chunks of their own, as stages read them: sums are then the same to the last bit.
        """
        schema = pa.schema([TRACES.arrow.field(name) for name in READ])
        rows = self._library.frames().of([self._library.graph.works[entry.key]], TRACES.name)
        read = rows.select("attempt", "seq", *READ).collect().sort("seq")
        parts = read.drop("seq").partition_by("attempt", as_dict=True, include_key=False)
        own = [parts[piece.attempt,] for piece in entry.slices(TRACES.name) if (piece.attempt,) in parts]
        return pa.concat_tables([schema.empty_table(), *(arrow(part).cast(schema) for part in own)])


def latest(library: Library, name: tuple[Hashable, ...], state: Hashable, make: Callable[[], Value]) -> Value:
    """Return what `make` returns, made anew when `state` is another; what was made before is let go.

    A run that goes on has another state after each piece of work: all of them would fill the memory.
    """
    place = ("latest", *name)
    known: tuple[Hashable, Value] | None = library.held(place)
    if known is None or known[0] != state:
        known = library.put(place, (state, make()))
    return known[1]


def _name(work: Mapping[str, Entry]) -> Name:
    stages = sorted(stage for stage in work if stage not in ("gate", "evaluation"))
    return tuple((stage, *work[stage].identity) for stage in stages)

"""relations: what the SQL views of `storage/read/views` read, and `select`, which returns their rows as polars frames.

Which results count for a step, and which rows expired, `StepHistory` and the ledger say: they are the relation
`lineages`, one row per batch of rollouts, which the views join with the stored tables.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import polars as pl

from flows.queries.notes import notes_of_rollouts
from flows.queries.step_history import StepHistory, StepLineage, present
from storage.read import views
from storage.read.frames import USES, Frames
from storage.read.lineage import Work
from storage.read.views import Relations, all_views
from storage.schemas.stage_tables import TABLES
from tasks.arrays.finding import QUARANTINED
from tasks.inference.trace_rows.failures import STALE, STRAGGLER, UNSCORED
from tasks.metrics.accounting import EVALUATED, NO_WEIGHT, PENDING, REFUSED, TRAINED, outcome_of
from tasks.stages import shown_stage

EXPIRED = "expired"
"""The outcome of a rollout whose deciding rows were dropped for their age (storage.records)."""
ROLLOUT_COLUMNS = tuple(all_views()["rollouts"].columns)
MADE = {
    **{"traces": "traces", "verdicts": "verdicts", "samples": "samples", "batches": "batches"},
    **{"decisions": "decision", "updates": "updates", "token_statistics": "updates", "token_masks": "updates"},
}
"""Tables by the work of a lineage that makes their rows."""


def relations(frames: Frames) -> Relations:
    """Return the relations for all runs of `frames`; each is made when it is read."""
    tables = {table: partial(frames.dataset, table) for table in TABLES}

    def lineages() -> list[StepLineage]:
        return [lineage for run in frames.run_names for lineage in StepHistory(frames.graph, run).lineages]

    return {**tables, **_made_relations(frames, lineages)}


def relations_of(frames: Frames, lineages: Sequence[StepLineage]) -> Relations:
    """Return the relations of some lineages: rows of other work are not read."""
    makers = {table: present(*(getattr(lineage, name) for lineage in lineages)) for table, name in MADE.items()}
    makers["messages"] = makers["token_policies"] = [work for _, work in _message_works(frames, lineages)]
    tables = {table: partial(frames.rows, works, table) for table, works in makers.items()}
    return {**tables, **_made_relations(frames, lambda: lineages)}


Lineages = Sequence[StepLineage]


def _lineages(frames: Frames, lineages: Lineages) -> Iterator[tuple[Any, ...]]:
    for place, lineage in enumerate(lineages):
        works = [getattr(lineage, name) for name in _KEYS]
        keys = [work and work.key for work in works]
        decisive = {name: getattr(lineage, name) for name in ("verdicts", "samples", "batches")}
        # What was trained was approved: then nobody needs the decision's row any more.
        expired = _has_expired_rows(frames, **decisive, decisions=None if lineage.updates else lineage.decision)
        masks_lost = _has_expired_rows(frames, token_masks=lineage.updates)
        yield lineage.run, *keys, lineage.for_training, expired, masks_lost, place


def _message_sources(frames: Frames, lineages: Lineages) -> Iterator[tuple[str, str, bool]]:
    for key, work in _message_works(frames, lineages):
        yield key, work.key, _has_expired_rows(frames, token_policies=work)


def _message_works(frames: Frames, lineages: Lineages) -> list[tuple[str, Work]]:
    """Return the key of each work of rollouts with the work that made the messages: scoring again makes none."""
    traces = present(*(lineage.traces for lineage in lineages))
    return [(work.key, source) for work in traces for source in frames.graph.origins(work, "messages")]


def _recorded_work(frames: Frames) -> Iterator[tuple[Any, ...]]:
    """Yield the work that each run uses, with the time from its first part to its last."""
    for run in frames.run_names:
        for work in frames.graph.of_run(run).works.values():
            # A finished entry spans all its parts; before that they are all there is.
            entries = [work.entry] if work.finished else frames.store.ledger.parts(work.key) or [work.entry]
            # Parts that do not count have slices that are not among those of the work.
            tokens = sum(entry.tokens for entry in entries if {*entry.outputs} <= {*work.slices})
            times = min(entry.started_at for entry in entries), max(entry.finished_at for entry in entries)
            stage = shown_stage(work.stage, work.inputs)
            yield run, work.step, stage, work.key, work.computed_by, work.finished, [*work.runs], tokens, *times


def _slice_order(_: Frames, lineages: Lineages) -> Iterator[tuple[str, int]]:
    """Yield the place of each slice of rollouts in its work: the ledger has the order that tables do not keep."""
    for work in present(*(lineage.traces for lineage in lineages)):
        for place, piece in enumerate(work.slices_of("traces")):
            yield piece.attempt, place


def _quarantine_rows(frames: Frames, _: Lineages) -> Iterator[tuple[str]]:
    """Yield each rollout that somebody found unfit, whether or not a run went by that."""
    yield from ((name,) for name in {name for finding in frames.store.quarantines.all() for name in finding.trace_ids})


def _packings(frames: Frames, _: Lineages) -> Iterator[tuple[str, int | None]]:
    """Yield each packing with the tokens that a row has room for, None where the ledger does not say."""
    for work in frames.graph.makers("batches"):
        yield work.key, work.entry.section.get("packing", {}).get("tokens_per_row")


def _outcome_rules(*_: Any) -> Iterator[tuple[str | None, ...]]:
    """Yield `tasks.metrics.accounting.outcome_of` as rows.

    `error` and `filter` stand for any further class of error and filter; as a detail they mean its name.
    """
    errors, reasons = (None, STRAGGLER, STALE, UNSCORED, "error"), (None, QUARANTINED, "filter")
    for key in product(errors, reasons, (TRAINED, NO_WEIGHT, REFUSED, PENDING, EVALUATED, EXPIRED)):
        yield *key, *outcome_of(*key)


_KEYS = ("traces", "verdicts", "samples", "batches", "decision", "updates")
RELATIONS: dict[str, tuple[Callable[[Frames, Lineages], Iterable[Any]], dict[str, Any]]] = {
    # The run, the key of the work of each stage, null where it is not done, whether rows that decide outcomes, or say
    # which tokens were masked, were dropped for their age, and the order.
    "lineages": (
        _lineages,
        dict.fromkeys(("run", *_KEYS), pl.String)
        | dict.fromkeys(("for_training", "expired", "masks_lost"), pl.Boolean)
        | {"place": pl.Int64},
    ),
    "message_sources": (_message_sources, {"key": pl.String, "messages": pl.String, "policies_lost": pl.Boolean}),
    "slice_order": (_slice_order, {"attempt": pl.String, "place": pl.Int64}),
    "quarantined": (_quarantine_rows, {"trace_id": pl.String}),
    "packings": (_packings, {"key": pl.String, "tokens_per_row": pl.Int64}),
    "outcome_rules": (
        _outcome_rules,
        dict.fromkeys(("error_class", "reason", "otherwise", "outcome", "detail"), pl.String),
    ),
}
"""Relations that the ledger and the rules make: what yields their rows, and their columns."""
RECORDED_WORK: dict[str, Any] = {
    **{"run": pl.String, "step": pl.Int64, "stage": pl.String, "key": pl.String, "computed_by": pl.String},
    **{"finished": pl.Boolean, "used_by": pl.List(pl.String), "tokens": pl.Int64},
    **dict.fromkeys(("started_at", "finished_at"), pl.Datetime("us", "UTC")),
}
REFERENCE_LOGPROBS: dict[str, Any] = {
    **{"samples": pl.String, "trace_id": pl.String, "message": pl.Int32, "logprobs": pl.List(pl.Float32)},
}


def _reference_logprobs(frames: Frames, lineages: Lineages) -> pl.LazyFrame:
    """Return the rows of table `references`, each by the key of the samples that were made with it."""
    works = present(*(lineage.samples for lineage in lineages))
    pairs = [(work.key, source) for work in works for source in frames.graph.sources(work, "references")]
    keys = pl.LazyFrame([(key, source.key) for key, source in pairs], ("samples", "key"), orient="row")
    rows = frames.rows([source for _, source in pairs], "references")
    return rows.join(keys.cast(pl.String), on="key").select(*REFERENCE_LOGPROBS)


def _made_relations(frames: Frames, lineages: Callable[[], Lineages]) -> Relations:
    of_frames = cache(lineages)

    def relation(name: str) -> pl.DataFrame:
        rows, columns = RELATIONS[name]
        return pl.DataFrame([*rows(frames, of_frames())], columns, orient="row")

    return {
        **{name: partial(relation, name) for name in RELATIONS},
        USES.name: partial(frames.dataset, USES.name),
        "recorded_work": lambda: pl.DataFrame([*_recorded_work(frames)], RECORDED_WORK, orient="row"),
        "rollout_notes": lambda: notes_of_rollouts(frames.store),
        "reference_logprobs": lambda: _reference_logprobs(frames, of_frames()),
    }


def _has_expired_rows(frames: Frames, **makers: Work | None) -> bool:
    """Return whether rows of some tables, by the work that made them, were dropped for their age."""
    pieces = [piece for table, work in makers.items() if work for piece in work.slices_of(table)]
    return bool(frames.store.slices.expired_slices.find(pieces))


def select(
    frames: Frames, lineages: Lineages, query: str, where: Mapping[str, pl.Expr] | None = None, **parameters: Any
) -> pl.DataFrame:
    """Return the rows of a query over views of some lineages alone; `where` has conditions on the rows of tables."""
    relations = relations_of(frames, lineages)

    def rows(table: str, condition: pl.Expr) -> pl.LazyFrame:
        frame: pl.LazyFrame = relations[table]()
        return frame.filter(condition)

    fewer = {table: partial(rows, table, condition) for table, condition in (where or {}).items()}
    return views.select({**relations, **fewer}, query, **parameters)


def select_of_trace(frames: Frames, lineage: StepLineage, trace_id: str, query: str) -> pl.DataFrame:
    """Return the same as `select` for one rollout of a lineage, `$id`; of large tables its rows alone are read."""
    of_trace = pl.col("trace_id") == trace_id
    where = dict.fromkeys(("messages", "token_policies", "samples", "reference_logprobs"), of_trace)
    where["token_statistics"] = pl.col("sample_id").str.starts_with(f"{trace_id}/")
    query_of_rows = 'select distinct "row" from packed_samples where trace_id = $id'
    numbers = select(frames, [lineage], query_of_rows, where, id=trace_id)["row"].to_list()
    where["batches"] = pl.col("row").is_in(numbers)
    return select(frames, [lineage], query, where, id=trace_id)


def select_from(rollouts: pl.DataFrame, query: str, **parameters: Any) -> pl.DataFrame:
    """Return the rows of a query over views of rollouts that were read before, with columns of view `rollouts`."""
    return views.select({"rollouts": lambda: rollouts}, query, **parameters)

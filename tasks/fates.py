"""Fates: what became of every rollout that a run uses, and of its tokens and seconds, out of the tables of a store.

`tasks.metrics.accounting` says the same of one step, from the rows that its stages hold, and checks it before training. Here
the whole store is looked at, finished or not: what is not decided yet is pending.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise

import polars as pl

from storage.read.frames import Derivation, Frames
from storage.read.lineage import Graph, Work
from tasks.metrics.accounting import NO_WEIGHT, PENDING, REFUSED, TRAINED, fate_of

EVALUATED, EXPIRED = "evaluated", "expired"
"""Sampled to score a policy, never to train on; not known any more, as the rows that would say it were dropped for
their age (storage.expired_slices)."""
EVALUATION = "evaluation_assignment"

FATES = {
    "run": pl.String,
    "step": pl.Int64,
    "environment": pl.String,
    "trace_id": pl.String,
    "fate": pl.String,
    "detail": pl.String,
    "stale": pl.Boolean,
    "num_tokens": pl.Int64,
    "num_sampled_tokens": pl.Int64,
    "seconds": pl.Float64,
    "key": pl.String,
}
"""One row for each rollout that a run uses; `key` is the work that made the trace, `stale` whether an older policy than
the step's sampled it, `seconds` its wall-clock of set-up, generation and scoring."""


@dataclass(frozen=True)
class Chain:
    """The work of one run that a batch of rollouts went through, as far as it is done."""

    run: str
    traces: Work
    verdicts: Work | None = None
    credits: Work | None = None
    batches: Work | None = None
    updates: Work | None = None
    decision: Work | None = None
    earlier: tuple["Chain", ...] = ()
    """The other ways on which the run trained too before it was done again, the last first."""

    @property
    def for_training(self) -> bool:
        """False of rollouts that score a policy."""
        return EVALUATION not in self.traces.inputs


def chains(graph: Graph, run: str) -> list[Chain]:
    """Return what became of every batch of rollouts that a run uses, by step.

    A run may have taken the same rollouts more than one way: what it does from a stage on has other keys once that
    stage has another version (tasks.runtime.stage.Stage), and work that was done under the version before stays its own. Then
    the way that was trained counts, of several the one trained last, as on the page of a batch; else the last work of
    each stage. A batch that was packed again and then held back, or not trained yet, makes nothing untrained.
    """
    own = graph.of_run(run)
    made = own.making("traces")
    return [_chain(own, run, work) for work in made if not own.users(work, "traces", made="traces")]


def _chain(graph: Graph, run: str, traces: Work) -> Chain:
    if EVALUATION in traces.inputs:
        return Chain(run, traces)
    trained = sorted(_trained(graph, traces), key=lambda way: age(way[-1]), reverse=True)
    ways = trained or [_untrained(graph, traces)]
    last, *earlier = (_along(graph, run, way) for way in ways)
    return replace(last, earlier=tuple(earlier))


WAY = ("traces", "verdicts", "credits", "batches", "updates")
"""The tables on the way from rollouts into a gradient: each is made of the one before."""


def _trained(graph: Graph, traces: Work) -> list[tuple[Work, ...]]:
    """Return every way from rollouts to a training: the work that made each table of `WAY`."""
    ways: list[tuple[Work, ...]] = [(traces,)]
    for table, made in pairwise(WAY):
        ways = [(*way, work) for way in ways for work in graph.users(way[-1], table, made=made)]
    return ways


def _untrained(graph: Graph, traces: Work) -> tuple[Work, ...]:
    """Return the last work of each stage after rollouts, as far as there is any."""
    way = [traces]
    for table, made in pairwise(WAY[:-1]):
        found = graph.users(way[-1], table, made=made)
        if not found:
            break
        way.append(max(found, key=age))
    return tuple(way)


def _along(graph: Graph, run: str, way: tuple[Work, ...]) -> Chain:
    """Return a way as a chain, with the last decision about its batch."""
    after: list[Work | None] = [*way[1:], *[None] * (len(WAY) - len(way))]
    verdicts, credits, batches, updates = after
    decided = graph.users(batches, "batches", made="decisions") if batches else []
    decision = max(decided, key=age, default=None)
    return Chain(run, way[0], verdicts, credits, batches, updates, decision)


def age(work: Work) -> tuple[datetime, str]:
    """Return what orders work by when it was done."""
    return work.entry.finished_at, work.key


def fates(frames: Frames) -> pl.LazyFrame:
    """Return one row for each rollout that a run uses, of all runs of `frames`; columns as in `FATES`."""
    found = [chain for run in frames.run_names for chain in chains(frames.graph, run)]
    return fates_of(frames, found).lazy()


def accounting(frames: Frames) -> pl.LazyFrame:
    """Return what became of rollouts, tokens and seconds, by run, step, environment, fate and detail."""
    return (
        fates(frames)
        .group_by("run", "step", "environment", "fate", "detail")
        .agg(
            num_traces=pl.len().cast(pl.Int64),
            num_stale=pl.col("stale").sum().cast(pl.Int64),
            num_tokens=pl.col("num_tokens").sum(),
            num_sampled_tokens=pl.col("num_sampled_tokens").sum(),
            seconds=pl.col("seconds").sum(),
        )
        .sort("run", "step", "environment", "fate", "detail")
    )


DERIVED: dict[str, Derivation] = {"fates": fates, "accounting": accounting}
"""Tables that are made out of those of a store: for `storage.open(root, derived=DERIVED)`."""


def fates_of(frames: Frames, found: list[Chain]) -> pl.DataFrame:
    """Return one row for each rollout of some chains alone, as `fates` has it; nothing else is read."""
    rows = _chains(frames, found).join(_traces(frames, found), on="key")
    rows = rows.join(_reasons(frames, found), on=["verdicts", "trace_id"], how="left")
    rows = rows.join(packed(frames, found), on=["batches", "trace_id"], how="left")
    waits = pl.col("for_training").not_() | pl.col("batches").is_null() | pl.col("packed").is_not_null()
    dropped = pl.col("expired") & pl.col("for_training") & pl.col("packed").is_null()
    of_others = pl.when(dropped).then(pl.lit(EXPIRED)).when(waits).then("outcome").otherwise(pl.lit(NO_WEIGHT))
    rows = rows.with_columns(otherwise=of_others)
    given = ["error_class", "reason", "otherwise"]
    return rows.join(_ruled(rows.select(given).unique()), on=given, nulls_equal=True).select(*FATES)


def _ruled(combinations: pl.DataFrame) -> pl.DataFrame:
    """Ask the rule of the accounts, once for each combination that there is."""
    decided = [ruled(*each) for each in combinations.iter_rows()]
    fate, detail = zip(*decided, strict=True) if decided else ((), ())
    return combinations.with_columns(fate=pl.Series(fate, dtype=pl.String), detail=pl.Series(detail, dtype=pl.String))


def ruled(error_class: str | None, reason: str | None, otherwise: str) -> tuple[str, str]:
    """Return fate and detail as `fate_of` does; of a rollout that scored a policy, an error is only the detail."""
    return (EVALUATED, error_class or "") if otherwise == EVALUATED else fate_of(error_class, reason, otherwise)


def _chains(frames: Frames, found: list[Chain]) -> pl.DataFrame:
    """Return the chains as rows: their keys, and what becomes of a rollout that nothing holds back."""
    against = refused(frames, found)
    rows = [
        {
            "run": chain.run,
            "key": chain.traces.key,
            "verdicts": chain.verdicts and chain.verdicts.key,
            "batches": chain.batches and chain.batches.key,
            "for_training": chain.for_training,
            "expired": expired(frames, chain),
            "outcome": outcome(chain, against),
        }
        for chain in found
    ]
    text = dict.fromkeys(("run", "key", "verdicts", "batches"), pl.String)
    flags = dict.fromkeys(("for_training", "expired"), pl.Boolean)
    return pl.DataFrame(rows, schema={**text, **flags, "outcome": pl.String})


def expired(frames: Frames, chain: Chain) -> bool:
    """Say whether rows of a chain were dropped for their age that say what became of its rollouts after sampling."""
    decided = None if chain.updates else chain.decision
    made = {"verdicts": chain.verdicts, "credits": chain.credits, "batches": chain.batches, "decisions": decided}
    pieces = [piece for table, work in made.items() if work for piece in work.slices_of(table)]
    return bool(frames.store.slices.retirements.of(pieces))


def outcome(chain: Chain, refused: Collection[str]) -> str:
    """Return the fate of a packed rollout of a chain; `refused` are the decisions, by key, that were against it."""
    if not chain.for_training:
        return EVALUATED
    if chain.updates:
        return TRAINED
    return REFUSED if chain.decision and chain.decision.key in refused else PENDING


def refused(frames: Frames, found: list[Chain]) -> set[str]:
    """Return the decisions that were against a batch of some chains, by key."""
    decisions = frames.of(_present(chain.decision for chain in found), "decisions")
    return set(decisions.filter(~pl.col("approved")).select("key").collect()["key"])


def _traces(frames: Frames, found: list[Chain]) -> pl.DataFrame:
    spans = (pl.col(f"{name}_seconds") for name in ("setup", "generation", "scoring"))
    return (
        frames.of(_present(chain.traces for chain in found), "traces")
        .select(
            "key",
            "step",
            "environment",
            "trace_id",
            "error_class",
            stale=pl.col("staleness") > 0,
            num_tokens=pl.col("num_input_tokens") + pl.col("num_output_tokens"),
            num_sampled_tokens=pl.col("num_output_tokens"),
            seconds=pl.sum_horizontal(*spans),
        )
        .collect()
    )


def _reasons(frames: Frames, found: list[Chain]) -> pl.DataFrame:
    verdicts = frames.of(_present(chain.verdicts for chain in found), "verdicts")
    return verdicts.select(pl.col("key").alias("verdicts"), "trace_id", "reason").collect()


def packed(frames: Frames, found: list[Chain]) -> pl.DataFrame:
    """Return the rollouts that have a sample in a batch, by the key of the batch."""
    pairs = [(chain.credits.key, chain.batches.key) for chain in found if chain.credits and chain.batches]
    keys = pl.DataFrame(sorted(set(pairs)), schema={"credits": pl.String, "batches": pl.String}, orient="row")
    credits = frames.of(_present(chain.credits for chain in found), "credits")
    samples = credits.select(pl.col("key").alias("credits"), "sample_id", "trace_id")
    rows = frames.of(_present(chain.batches for chain in found), "batches")
    packed = rows.select(pl.col("key").alias("batches"), pl.col("sample_ids").alias("sample_id")).explode("sample_id")
    joined = packed.join(keys.lazy(), on="batches").join(samples, on=["credits", "sample_id"])
    return joined.select("batches", "trace_id", packed=pl.lit(True)).unique().collect()


def _present(works: Iterable[Work | None]) -> list[Work]:
    """Return the work that there is, each once."""
    return list({work.key: work for work in works if work is not None}.values())

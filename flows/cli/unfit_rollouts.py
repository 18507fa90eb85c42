"""search, uses: rollouts that a condition describes, and every batch, step and policy that used them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import polars as pl

from flows.queries.conditions import HELP, BadCondition, matching_traces
from flows.queries.views import relations
from storage.read.frames import Frames
from storage.read.lineage import Graph, Work
from storage.read.views import select
from storage.store import Store


class NoSuchRollouts(ValueError):
    """A condition describes no rollout, or is none."""


def search(store: Store, where: str, run: str = "") -> tuple[list[str], int]:
    """Return the sorted ids of the rollouts for which the condition `where` holds, and of how many it was asked.

    They are of one run, if it is named, as that run uses them. Of all runs a rollout that was graded again has a row
    with each grading; one is enough. Raises RunUnknown, and NoSuchRollouts where the condition is none or holds for
    nothing.
    """
    frames = Frames(store, relations)
    frames = frames.run(run) if run else frames
    try:
        trace_ids, num_read = matching_traces(frames, where)
    except BadCondition as error:
        raise NoSuchRollouts(f"--where: {error}\nNothing was recorded.") from error
    if not trace_ids:
        place = f"run {run!r}" if run else "any run"
        raise NoSuchRollouts(
            f"no rollout of {place} fits: {where!r} holds for none of {num_read}.\nNothing was recorded. {HELP}"
        )
    return trace_ids, num_read


@dataclass(frozen=True)
class BatchUse:
    """One batch of one run that holds samples of the rollouts."""

    run: str
    step: int
    batch: str
    """Key of the packing that made the batch."""
    num_rows: int | None
    """Packed rows with such a sample; None where the batch's rows are kept no longer, and nobody knows."""
    num_samples: int | None
    num_tokens: int | None
    """Tokens of these samples, prompts included."""
    policy: str | None
    """Key of the policy that was trained on the batch; None where none was."""
    version: int | None
    """Its version; every later policy of the run comes from it."""
    num_later: int
    """Policies of the run that were trained from it, directly or not."""


Counts = tuple[int | None, int | None, int | None]
"""Rows, samples and tokens of a batch that are of certain rollouts; all None where its rows are kept no longer."""
_COUNTS = """
select key, count(distinct "row"), count(*), sum(stop - start)::bigint
from (
    select
        key,
        "row",
        regexp_extract(unnest(sample_ids), '(?s)^(.*)/', 1) as trace_id,
        -- Padding follows the last sample.
        unnest(cu_seqlens[1:len(sample_ids)]) as start,
        unnest(cu_seqlens[2:len(sample_ids) + 1]) as stop
    from batches
)
where list_contains($ids::varchar[], trace_id)
group by key
"""


def uses(store: Store, trace_ids: Iterable[str]) -> list[BatchUse]:
    """Return where rollouts were used, by run and step; a batch that a run shares with another counts for both."""
    frames, ids = Frames(store, relations), sorted(set(trace_ids))
    rows = store.scan("traces").select("trace_id", "key").filter(pl.col("trace_id").is_in(ids))
    touched = set(rows.collect()["key"].to_list())  # rollouts, and what graded them again
    # By the keys in the inputs first: reading every batch of a store would take minutes.
    batches = [work for work in frames.graph.makers("batches") if not touched.isdisjoint(work.inputs.values())]
    counts = _counts(frames, batches, ids)
    found = [
        use for batch in batches if batch.key in counts for use in _uses_of(frames.graph, batch, counts[batch.key])
    ]
    return sorted(found, key=lambda use: (use.run, use.step, use.batch))


def _counts(frames: Frames, batches: Sequence[Work], ids: Sequence[str]) -> dict[str, Counts]:
    """Return how many rows, samples and tokens of batches are of these traces, by key; none where nothing is."""
    expired = frames.store.slices.expired_slices
    gone: dict[str, Counts] = {
        batch.key: (None, None, None) for batch in batches if expired.find(batch.slices_of("batches"))
    }
    kept = frames.rows([batch for batch in batches if batch.key not in gone], "batches")
    found = select({"batches": lambda: kept}, _COUNTS, ids=ids)
    return gone | {key: (rows, samples, tokens) for key, rows, samples, tokens in found.iter_rows()}


def _uses_of(graph: Graph, batch: Work, counts: Counts) -> Iterator[BatchUse]:
    for run in batch.runs:
        of_run = graph.of_run(run)
        policies = [work for work in of_run.children(batch.key) if work.stage == "training"]
        if not policies:
            yield BatchUse(run, batch.step, batch.key, *counts, None, None, 0)
        for policy in policies:
            later = sum(work.stage == "training" for work in of_run.descendants(policy.key))
            yield BatchUse(run, batch.step, batch.key, *counts, policy.key, policy.step + 1, later)

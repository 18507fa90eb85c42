"""search, uses: rollouts that a condition describes, and every batch, step and policy that used them."""

from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

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


COUNTS = ("num_rows", "num_samples", "num_tokens")
"""Packed rows, samples, and tokens (prompts included) of a batch that are of certain rollouts."""
_COUNTS = """
select
    key,
    count(distinct "row") as num_rows,
    count(*) as num_samples,
    sum(stop - start)::bigint as num_tokens
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


def uses(store: Store, trace_ids: Iterable[str]) -> list[dict[str, Any]]:
    """Return where rollouts were used: one row for each batch of each run, by run and step.

    `batch` is the key of its packing. COUNTS are None where the rows of a batch are kept no longer. `policy` is the key
    of the policy that was trained on the batch, `version` its version, None where there is none, and `num_later` counts
    the policies of the run that were trained from it, directly or not.
    """
    frames, ids = Frames(store, relations), sorted(set(trace_ids))
    rows = store.scan("traces").select("trace_id", "key").filter(pl.col("trace_id").is_in(ids))
    touched = set(rows.collect()["key"].to_list())  # rollouts, and what graded them again
    # By the keys in the inputs first: reading every batch of a store would take minutes.
    batches = [work for work in frames.graph.makers("batches") if not touched.isdisjoint(work.inputs.values())]
    expired = {batch.key for batch in batches if store.slices.expired_slices.find(batch.slices_of("batches"))}
    stored = frames.rows([batch for batch in batches if batch.key not in expired], "batches")
    counts = {row.pop("key"): row for row in select({"batches": lambda: stored}, _COUNTS, ids=ids).to_dicts()}
    counts |= {key: dict.fromkeys(COUNTS) for key in expired}
    found = [
        use for batch in batches if batch.key in counts for use in _uses_of(frames.graph, batch, counts[batch.key])
    ]
    return sorted(found, key=itemgetter("run", "step", "batch"))


def _uses_of(graph: Graph, batch: Work, counts: Mapping[str, int | None]) -> Iterator[dict[str, Any]]:
    for run in batch.runs:
        of_run, use = graph.of_run(run), {"run": run, "step": batch.step, "batch": batch.key, **counts}
        policies = [work for work in of_run.children(batch.key) if work.stage == "training"]
        for policy in policies:
            later = sum(work.stage == "training" for work in of_run.descendants(policy.key))
            yield {**use, "policy": policy.key, "version": policy.step + 1, "num_later": later}
        if not policies:
            yield {**use, "policy": None, "version": None, "num_later": 0}

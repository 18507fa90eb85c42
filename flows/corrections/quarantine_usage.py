"""What rollouts went into: every batch, step and policy that used them, run by run."""

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from storage.errors import SliceExpired
from storage.refs import Entry
from storage.store import Store


@dataclass(frozen=True)
class Use:
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


class Counts(NamedTuple):
    """How much of a batch is of certain rollouts; all None where its rows are kept no longer."""

    num_rows: int | None
    num_samples: int | None
    num_tokens: int | None


def uses(store: Store, trace_ids: Iterable[str]) -> list[Use]:
    """Return where rollouts were used, by run and step; a batch that a run shares with another counts for both."""
    wanted = frozenset(trace_ids)
    touched = _makers(store, wanted)
    found = []
    for entry in store.ledger.entries(stage="packing"):
        if touched.isdisjoint(entry.inputs.values()):
            continue
        counts = _count(store, entry, wanted)
        if counts.num_samples != 0:
            trained = store.ledger.entries(run=entry.run, stage="training")
            found += _of_batch(entry, counts, trained)
    return sorted(found, key=lambda use: (use.run, use.step, use.batch))


def _makers(store: Store, trace_ids: Set[str]) -> set[str]:
    """Return the keys of all work that made a row of these traces: rollouts, and what graded them again."""
    rows = store.scan("traces").select("trace_id", "key").filter(pl.col("trace_id").is_in(sorted(trace_ids)))
    return set(rows.collect()["key"].to_list())


def _count(store: Store, entry: Entry, trace_ids: Set[str]) -> Counts:
    """Return how many rows, samples and tokens of a batch are of these traces."""
    try:
        batches = store.read(entry.slices("batches"), ["sample_ids", "cu_seqlens"])
    except SliceExpired:
        return Counts(None, None, None)
    rows, lengths = 0, []
    for row in batches.to_pylist():
        borders = row["cu_seqlens"]
        own = [
            end - start
            for sample, start, end in zip(row["sample_ids"], borders, borders[1:], strict=False)  # then comes padding
            if sample.rpartition("/")[0] in trace_ids
        ]
        rows += bool(own)
        lengths += own
    return Counts(rows, len(lengths), sum(lengths))


def _of_batch(batch: Entry, counts: Counts, trained: list[Entry]) -> list[Use]:
    made = [entry for entry in trained if entry.inputs.get("packing") == batch.key]
    if not made:
        return [Use(batch.run, batch.step, batch.key, *counts, None, None, 0)]
    return [
        Use(batch.run, batch.step, batch.key, *counts, each.key, each.step + 1, _num_from(each.key, trained))
        for each in made
    ]


def _num_from(policy: str, trained: list[Entry]) -> int:
    """Return how many policies were trained from one, directly or not."""
    of_parent: dict[str, list[str]] = {}
    for entry in trained:
        of_parent.setdefault(entry.inputs["policy"], []).append(entry.key)
    line = list(of_parent.get(policy, ()))
    for key in line:  # grows while it is walked
        line += of_parent.get(key, ())
    return len(line)

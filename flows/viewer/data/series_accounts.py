"""What became of the rollouts of many steps at once, as `tasks.fates` says it of each rollout: counts by fate.

Errors and verdicts are read with the rollouts anyway; whether the rest was packed takes one column more of two tables.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from flows.viewer.data.run_steps import StepWork
from flows.viewer.data.shared_reads import each_once
from flows.viewer.library import Library
from storage.read.lineage import Work, marks
from tasks.fates import EXPIRED, expired, outcome, packed, refused, ruled
from tasks.metrics.accounting import NO_WEIGHT

Ends = Mapping[tuple[str | None, str | None], int]
"""How many rollouts ended with an error class and were left out for a reason; None for none."""


@dataclass(frozen=True)
class Packed:
    """What became of the rollouts of a step that neither an error nor a verdict held back."""

    outcome: str
    """The fate of those that were packed, or of all where nothing was packed yet."""
    otherwise: str
    """The fate of the others."""
    num_packed: int | None
    """None where nothing was packed yet."""


def ends_of(traces: pl.DataFrame, verdicts: pl.DataFrame) -> Mapping[str, Ends]:
    """Return how the rollouts of steps ended, by the column `step`, out of their rows and those of their verdicts."""
    rows = traces.join(verdicts, on=["step", "trace_id"], how="left")
    found: dict[str, dict[tuple[str | None, str | None], int]] = {}
    for step, error, reason, count in rows.group_by("step", "error_class", "reason").len().iter_rows():
        found.setdefault(step, {})[error, reason] = count
    return found


def packed_of(library: Library, steps: Sequence[StepWork]) -> list[Packed]:
    """Return what became of those that nothing held back; one look at each table for all that was not read before."""
    by_name = {_name(each): each for each in steps}

    def read(names: list[tuple[str, ...]]) -> dict[tuple[str, ...], Packed]:
        chains = [by_name[name].last for name in names]
        frames = library.frames()
        against = refused(frames, chains)
        counts = dict(packed(frames, chains).group_by("batches").len().iter_rows())
        return {
            name: Packed(
                outcome(chain, against),
                EXPIRED if expired(frames, chain) else NO_WEIGHT,
                counts.get(chain.batches.key, 0) if chain.batches else None,
            )
            for name, chain in zip(names, chains, strict=True)
        }

    found = each_once(library, "packed rollouts", list(by_name), read)
    return [found[_name(each)] for each in steps]


def account_numbers(ends: Ends, after: Packed) -> dict[str, float]:
    """Return the counts of a step by fate, `accounting/trained`, `accounting/filtered/zero_advantage`.

    As `flows.metrics` has them; what is not decided yet is pending. A fate that no rollout met has no entry.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for (error, reason), count in ends.items():
        if error is not None or reason is not None:
            counts[ruled(error, reason, after.outcome)] += count
    free = ends.get((None, None), 0)
    num_packed = free if after.num_packed is None and after.otherwise != EXPIRED else after.num_packed or 0
    counts[after.outcome, ""] += min(free, num_packed)
    counts[after.otherwise, ""] += free - min(free, num_packed)
    return {"/".join(filter(None, ("accounting", *fate))): float(count) for fate, count in counts.items() if count}


def _name(step: StepWork) -> tuple[str, ...]:
    chain = step.last
    works: tuple[Work | None, ...] = (chain.verdicts, chain.credits, chain.batches, chain.decision, chain.updates)
    return marks((*step.traces, *works))

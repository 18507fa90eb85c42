"""Rounds: rollouts of an evaluation that ended with an error are made again, and the later ones count."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import texts


def latest_attempts(rounds: Sequence[pa.Table]) -> pa.Table:
    """Return traces in which those of an assignment that was made again take the place of its earlier ones.

    `rounds` are in order of time, each with the column `assignment_id`.
    """
    kept = list(rounds[:1])
    for later in rounds[1:]:
        again = later["assignment_id"].combine_chunks()
        kept = [each.filter(pc.invert(pc.is_in(each["assignment_id"], value_set=again))) for each in kept]
        kept.append(later)
    return pa.concat_tables(kept)


def errored_assignments(traces: pa.Table) -> list[str]:
    """Return the assignments of which any trace ended with an error, in order."""
    return sorted(set(texts(traces.filter(pc.is_valid(traces["error_class"]))["assignment_id"])))

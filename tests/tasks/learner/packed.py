"""Packed rows for the learner's tests: samples with random streams, and the table `batches` made of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from storage.schemas.stage_tables import BATCHES

STREAMS = ("logprobs", "temperatures", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")


@dataclass(frozen=True)
class Sample:
    """One sample with its per-token streams as lists."""

    sample_id: str
    token_ids: list[int]
    streams: dict[str, list[float]]


def sample(sample_id: str, length: int, seed: int, component: str = "rl", temperature: float = 1.0) -> Sample:
    """Return a random sample whose second half has weight 1 in `component`."""
    rng = np.random.default_rng(seed)
    weighted = (np.arange(length) >= max(1, length // 2)).astype(np.float32)
    streams = {
        "logprobs": rng.uniform(-7.0, -5.0, length) * weighted,
        "temperatures": np.full(length, temperature),
        "advantages": rng.normal(size=length) * weighted,
        **{f"{name}_weights": weighted * (name == component) for name in ("rl", "ce", "ref_kl")},
    }
    as_float32 = {name: stream.astype(np.float32).tolist() for name, stream in streams.items()}
    return Sample(sample_id, rng.integers(0, 256, length).tolist(), as_float32)


def padding(length: int) -> Sample:
    """Return tokens without weight that stand for no sample."""
    streams = {name: [0.0] * length for name in STREAMS} | {"temperatures": [1.0] * length}
    return Sample("", [0] * length, streams)


def batches(
    rows: Sequence[Sequence[Sample]],
    places: Sequence[tuple[int, int]] | None = None,
    updates: Sequence[int] | None = None,
) -> pa.Table:
    """Return packed rows as the table `batches`, with true denominators.

    `places` are (rank, micro_step) of each row, by default one micro-step after the other on rank 0; `updates` its
    optimizer step, by default 0.
    """
    places = places or [(0, number) for number in range(len(rows))]
    updates = updates or [0] * len(rows)
    records = [_record(number, row, places[number], updates[number]) for number, row in enumerate(rows)]
    for record in records:
        for name in ("rl", "ce", "ref_kl"):
            record[f"{name}_tokens"] = sum(
                np.count_nonzero(other[f"{name}_weights"]) for other in records if other["update"] == record["update"]
            )
    return pa.Table.from_pylist(records, schema=BATCHES.arrow)


def _record(number: int, row: Sequence[Sample], place: tuple[int, int], update: int) -> dict:
    return {
        "row": number,
        "update": update,
        "rank": place[0],
        "micro_step": place[1],
        "sample_ids": [part.sample_id for part in row if part.sample_id],
        "cu_seqlens": np.cumsum([0, *(len(part.token_ids) for part in row)]).tolist(),
        "token_ids": [token for part in row for token in part.token_ids],
        **{name: [value for part in row for value in part.streams[name]] for name in STREAMS},
    }


def changed(table: pa.Table, column: str, values: list, row: int = 0) -> pa.Table:
    """Return the table with another value of one column in one row: a planted fault."""
    column_values = table[column].to_pylist()
    column_values[row] = values
    index = table.schema.get_field_index(column)
    return table.set_column(index, table.schema.field(column), pa.array(column_values, table.schema.field(column).type))

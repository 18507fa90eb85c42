"""Recorded experts of packed rows are those of their tokens, in every sample that has them."""

import numpy as np
import pyarrow as pa
import pytest

from storage.schemas.contract import RowPlace, check_rows
from storage.schemas.stage_tables import BATCH_EXPERTS, ROUTED_EXPERTS
from tasks.arrays.samples import PackingBreach
from tasks.packing.stage import STAGE
from tests.fixtures.builders import trace, view
from tests.fixtures.stages import forked, inputs, packing, written

SHAPE = (3, 2)


TABLES = inputs([trace("a"), trace("b", reward=0.0)], [*forked("a"), *forked("b")])
"""Two forked traces, whose first messages have the tokens 1 and 2."""


def recorded(dtype, traces="ab"):
    """Experts of all messages but first ones."""
    sizes = {"width": np.dtype(dtype).itemsize, "num_layers": SHAPE[0], "top_k": SHAPE[1]}
    rows = [
        {name: row[name] for name in ("trace_id", "message")} | sizes | {"experts": coded(row["token_ids"], dtype)}
        for row in TABLES["messages"].to_pylist()
        if row["message"] and row["trace_id"] in traces
    ]
    return pa.Table.from_pylist(rows, schema=ROUTED_EXPERTS.arrow)


def coded(tokens, dtype):
    """Experts, (tokens, layers, k), whose numbers are the token's plus their place, as bytes."""
    return (np.array(tokens)[:, None, None] + np.arange(6).reshape(SHAPE)).astype(dtype).tobytes()


def packed_rows(experts=None, **section):
    tables = TABLES if experts is None else TABLES | {"routed_experts": experts}
    made = written(packing(tables, view(STAGE, packing={"tokens_per_row": 30, **section})))
    return made["batches"].to_pylist(), made.get("batch_experts")


@pytest.mark.parametrize("dtype", ["u1", "<u2"])
@pytest.mark.parametrize("data_parallel", [1, 3])
def test_experts_follow_their_tokens_into_every_row(dtype, data_parallel):
    batches, experts = packed_rows(recorded(dtype), data_parallel=data_parallel)
    check_rows(experts, BATCH_EXPERTS, RowPlace("batch_experts"))
    assert experts["row"].to_pylist() == [row["row"] for row in batches]
    for row, stored in zip(batches, experts["experts"].to_pylist(), strict=True):
        unrecorded = bytes(len(coded([1], dtype)))
        expected = [
            coded([token], dtype) if token > 2 and row["sample_ids"] else unrecorded for token in row["token_ids"]
        ]
        assert stored == b"".join(expected)


def test_without_records_there_is_no_table():
    assert packed_rows()[1] is packed_rows(ROUTED_EXPERTS.arrow.empty_table())[1] is None


def test_records_of_two_models_are_refused():
    with pytest.raises(PackingBreach, match="not of one model"):
        packed_rows(pa.concat_tables([recorded("u1", "a"), recorded("<u2", "b")]))

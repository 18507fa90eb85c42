"""The weights that a trace's tokens were trained with are those of its batch row, bit for bit."""

import numpy as np
import pytest

from flows.queries.store_reader import StoreReader
from flows.queries.tokens import TRAINED_WEIGHTS, WEIGHTS, tokens
from flows.queries.trace import find_trace, samples
from storage.schemas.stage_tables import BATCHES
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer import looking

pytestmark = pytest.mark.engine  # whole runs of several algorithms
LENGTH = 50
ALGORITHMS = {
    "dr_grpo": {"type": "dr_grpo", "length_normaliser": LENGTH},
    "grpo": {"type": "grpo", "normalise_std": True},
    "supervised": {"type": "supervised"},
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A store with a run of each algorithm, of two updates on one batch, whose rollouts go to different rows."""
    root = tmp_path_factory.mktemp("weights") / "store"
    packing = {"tokens_per_row": 24, "updates_per_step": 2, "data_parallel": 2}
    for name, algorithm in ALGORITHMS.items():
        rehearse(root, name, steps=1, algorithm=algorithm, packing=packing)
    return StoreReader.at(root)


def packed_samples(reader, run):
    """The weights by token of every packed sample, straight from the table."""
    (lineage,) = reader.history(run).lineages
    packed = {}
    for row in reader.store.read(lineage.batches.slices_of("batches")).select(BATCHES.arrow.names).to_pylist():
        for place, sample in enumerate(row["sample_ids"]):
            part = slice(*row["cu_seqlens"][place : place + 2])
            packed[sample] = {name: np.array(row[name][part], np.float32) for name in WEIGHTS}
    return packed


@pytest.mark.parametrize("run", list(ALGORITHMS))
def test_every_token_was_trained_with_what_its_batch_row_has(reader, run):
    packed, compared, updates = packed_samples(reader, run), 0, set()
    for name in looking.traces(reader, run):
        trace = find_trace(reader, run, name)
        branches = {row["branch"]: row for row in samples(reader, trace).iter_rows(named=True)}
        updates |= {row["update"] for row in branches.values()}
        for token in tokens(reader, trace, texts=False).iter_rows(named=True):
            row = packed.get(branches[token["branch"]]["sample_id"])
            for column, name in WEIGHTS.items():
                weight = np.float32(0) if row is None else row[column][token["position"]]
                assert token[TRAINED_WEIGHTS[name]] == (float(weight) or None), (trace.trace_id, token["position"])
                compared += weight != 0
            assert token["trained"] == any(token[name] is not None for name in TRAINED_WEIGHTS.values())
    weighted = sum(np.count_nonzero(row[column]) for row in packed.values() for column in WEIGHTS)
    assert compared == weighted > 50 and {0, 1} <= updates, "of both updates"

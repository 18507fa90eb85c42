"""The weights that a trace's tokens were trained with: on the page of the trace what its batch row has, bit for bit."""

import json
import re

import numpy as np
import polars as pl
import pytest

from flows.orchestration.states import GateRefused
from flows.queries import batch
from flows.queries.batch import row_samples
from flows.queries.store_reader import StoreReader
from flows.queries.tokens import TRAINED_WEIGHTS, WEIGHTS, tokens
from flows.queries.trace import find_trace, samples
from storage.schemas.stage_tables import BATCHES
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer import looking
from tests.flows.viewer.looking import pluck

pytestmark = pytest.mark.engine  # whole runs of several algorithms
LENGTH = 50
FORMS = ("--json", "--tokens")
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


def traces(reader, run):
    """All traces of the run's only step."""
    return [find_trace(reader, run, name) for name in looking.traces(reader, run)]


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
    for trace in traces(reader, run):
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


def test_dr_grpo_shows_the_weight_of_the_credit_and_the_one_that_was_trained(reader, command):
    step = batch.packed_step(reader, "dr_grpo", 0)
    rows, packed = batch.rows(reader, step).filter(update=0), batch.samples(reader, step)
    in_update = packed.filter(pl.col("row").is_in(rows["row"].implode()))["trace_id"].n_unique()
    # Rollouts that a filter dropped count too, in equal shares in both updates.
    made = reader.frames("dr_grpo")["traces"].collect()["reward"].count()
    num_rollouts = in_update + (made - packed["trace_id"].n_unique()) / 2
    expected = float(np.float32(rows["rl_tokens"][0] / (LENGTH * num_rollouts)))
    trace = find_trace(reader, "dr_grpo", packed["trace_id"][0])
    told = tokens(reader, trace).filter("trained")
    assert set(told["rl_weight"]) == {1.0} and set(told["trained_rl_weight"]) == {expected}
    assert told["trained_ce_weight"].null_count() == len(told) > 0, "no member is not zero"
    shown = [command(reader.store.root.address, "trace", trace.trace_id, "--run", "dr_grpo", form) for form in FORMS]
    assert expected in pluck(json.loads(shown[0])["tokens"], "trained_rl_weight")
    assert re.search(r" rl_weight +trained_rl_weight ", shown[1])


def test_the_sums_on_the_page_are_those_of_the_batch_row(reader):
    step = batch.packed_step(reader, "dr_grpo", 0)
    for trace in traces(reader, "dr_grpo"):
        page = looking.values(reader, f"/runs/dr_grpo/traces/{trace.trace_id}")
        columns = [message["tokens"]["columns"] for message in page["messages"]]
        total = sum(value for each in columns for value in each["trained_rl_weight"] if value is not None)
        (sample,) = page["samples"]
        if sample["row"] is None:
            assert total == 0 and sample["address"] is sample["weights"] is None
            continue
        assert page["scaled"] == ["rl_weight"]
        in_row = row_samples(reader, step, sample["row"]).filter(trace_id=trace.trace_id)
        assert total == in_row["rl_weights"][0] == sample["weights"]["rl_weights"] > 0
    other = next(trace for trace in traces(reader, "grpo") if tokens(reader, trace)["trained"].any())
    assert looking.values(reader, f"/runs/grpo/traces/{other.trace_id}")["scaled"] == [], "both are the same"


def test_what_was_packed_and_not_trained_has_no_weight_as_trained(tmp_path):
    with pytest.raises(GateRefused):
        rehearse(tmp_path, "held", steps=1, algorithm=ALGORITHMS["dr_grpo"], gate={"type": "rule", "rule": "false"})
    reader, num_packed = StoreReader.at(tmp_path), 0
    for trace in traces(reader, "held"):
        told = tokens(reader, trace)
        num_packed += samples(reader, trace)["row"].count()
        assert told["trained_rl_weight"].null_count() == len(told) and not told["trained"].any()
    assert num_packed > 0 and (told["rl_weight"] != 0).any()

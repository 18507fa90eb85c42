"""The weights that a trace's tokens were trained with: on the page of the trace what its batch row has, bit for bit."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from flows import cli
from flows.orchestration.states import GateRefused
from flows.queries import batch
from flows.queries.batch import row_samples
from flows.queries.store_reader import StoreReader
from flows.queries.tokens import TRAINED_WEIGHTS, WEIGHTS, tokens
from flows.queries.trace import FoundTrace, find_trace, samples
from flows.viewer import addresses
from flows.viewer.notebook import open_viewer
from flows.viewer.rendering import save_page
from storage.schemas.stage_tables import BATCHES
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer import looking

pytestmark = pytest.mark.engine  # whole runs of several algorithms
LENGTH = 50
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"type": "dr_grpo", "length_normaliser": LENGTH},
    "grpo": {"type": "grpo", "normalise_std": True},
    "supervised": {"type": "supervised"},
    "rloo": {"type": "rloo"},
}
Values = dict[str, Any]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run of each algorithm, of two updates on one batch, whose rollouts go to different rows."""
    root = tmp_path_factory.mktemp("weights") / "store"
    packing = {"tokens_per_row": 24, "updates_per_step": 2, "data_parallel": 2}
    for name, algorithm in ALGORITHMS.items():
        rehearse(root, name, steps=1, algorithm=algorithm, packing=packing)
    return root


@pytest.fixture(scope="module")
def library(root: Path) -> StoreReader:
    return StoreReader.at(root)


def traces(library: StoreReader, run: str) -> list[FoundTrace]:
    """All traces of the run's only step."""
    (lineage,) = library.history(run).lineages
    names = library.frames(run).rows([lineage.traces], "traces").select("trace_id").collect()["trace_id"]
    return [find_trace(library, run, name) for name in names]


def packed_step(library: StoreReader, run: str) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """The weights by token of every packed sample, straight from the table."""
    (lineage,) = library.history(run).lineages
    assert lineage.batches is not None
    found = {}
    for row in library.store.read(lineage.batches.slices_of("batches")).select(BATCHES.arrow.names).to_pylist():
        for place, sample in enumerate(row["sample_ids"]):
            part = slice(*row["cu_seqlens"][place : place + 2])
            found[sample] = {name: np.array(row[name][part], np.float32) for name in WEIGHTS}
    return found


def trained(library: StoreReader) -> FoundTrace:
    """A trace of the run that divides by a constant length, in the first row of its batch."""
    sample = batch.samples(library, batch.packed_step(library, "dr_grpo", 0)).row(0, named=True)
    return find_trace(library, "dr_grpo", sample["trace_id"])


def values_of(library: StoreReader, found: FoundTrace, **query: str) -> Values:
    """What the page of a trace says as JSON."""
    return looking.values(library, addresses.trace(found.run, found.trace_id), **query)


@pytest.mark.parametrize("run", list(ALGORITHMS))
def test_every_token_was_trained_with_what_its_batch_row_has(library: StoreReader, run: str) -> None:
    rows, compared, updates = packed_step(library, run), 0, set()
    for found in traces(library, run):
        told = tokens(library, found, texts=False)
        branches = {row["branch"]: row for row in samples(library, found).iter_rows(named=True)}
        updates |= {row["update"] for row in branches.values()}
        for token in told.iter_rows(named=True):
            own = rows.get(branches[token["branch"]]["sample_id"])
            for column, name in WEIGHTS.items():
                weight = np.float32(0) if own is None else own[column][token["position"]]
                assert token[TRAINED_WEIGHTS[name]] == (float(weight) or None), (found.trace_id, token["position"])
                compared += weight != 0
            assert token["trained"] == any(token[name] is not None for name in TRAINED_WEIGHTS.values())
        own_rows = [rows[row["sample_id"]] for row in branches.values() if row["sample_id"] in rows]
        for column, name in WEIGHTS.items():
            total = sum(float(each[column].astype(np.float64).sum()) for each in own_rows)
            assert told[TRAINED_WEIGHTS[name]].cast(pl.Float64).sum() == total
    weighted = sum(np.count_nonzero(each[column]) for each in rows.values() for column in WEIGHTS)
    assert compared == weighted > 50 and {0, 1} <= updates, "of both updates"


def test_dr_grpo_shows_the_weight_of_the_credit_and_the_one_that_was_trained(library: StoreReader) -> None:
    found = trained(library)
    of = batch.packed_step(library, "dr_grpo", 0)
    rows = batch.rows(library, of).filter(pl.col("update") == 0)
    own, packed = (
        batch.samples(library, of).filter(pl.col("row").is_in(each["row"].implode()))["trace_id"].n_unique()
        for each in (rows, batch.rows(library, of))
    )
    # Rollouts that a filter dropped count too, in equal shares in both updates.
    (lineage,) = library.history("dr_grpo").lineages
    made = library.frames("dr_grpo").rows([lineage.traces], "traces").select("reward").collect()["reward"].count()
    expected = np.float32(rows["rl_tokens"][0] / (LENGTH * (own + (made - packed) / 2)))
    told = tokens(library, found).filter("trained")
    assert set(told["rl_weight"]) == {1.0} and set(told["trained_rl_weight"]) == {float(expected)}
    assert told["trained_ce_weight"].null_count() == len(told) > 0, "no member is not zero"


def test_the_sums_on_the_page_are_those_of_the_batch_row(library: StoreReader) -> None:
    of = batch.packed_step(library, "dr_grpo", 0)
    for found in traces(library, "dr_grpo"):
        page = values_of(library, found)
        columns = [each["tokens"]["columns"] for each in page["messages"]]
        total = sum(value for each in columns for value in each["trained_rl_weight"] if value is not None)
        (sample,) = page["samples"]
        if sample["row"] is None:
            assert total == 0 and sample["address"] is sample["weights"] is None
            continue
        in_row = row_samples(library, of, sample["row"]).filter(pl.col("trace_id") == found.trace_id)
        assert total == in_row["rl_weights"][0] == sample["weights"]["rl_weights"] > 0


@pytest.mark.parametrize("run", list(ALGORITHMS))
def test_both_are_shown_where_they_differ_alone(library: StoreReader, run: str) -> None:
    found = next(each for each in traces(library, run) if tokens(library, each)["trained"].any())
    assert values_of(library, found)["scaled"] == (["rl_weight"] if run == "dr_grpo" else [])


def test_every_way_to_a_trace_has_both(library: StoreReader, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = trained(library)
    weight = tokens(library, found).filter("trained")["trained_rl_weight"][0]
    command = ["trace", found.trace_id, "--run", "dr_grpo", "--store", str(root)]
    assert cli.main([*command, "--json"]) == 0
    assert weight in [each["trained_rl_weight"] for each in json.loads(capsys.readouterr().out)["tokens"]]
    assert cli.main([*command, "--tokens", "--width", "200"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"advantage +rl +rl-train ", out) and re.search(rf" 1 +{weight:.3g} ", out)
    assert weight in open_viewer(root).trace(found.trace_id, "dr_grpo").tokens["trained_rl_weight"]
    address = addresses.trace("dr_grpo", found.trace_id, found.key)
    save_page(library, address, root.parent / "saved.html")
    for text in (looking.answer(library, address)[1], (root.parent / "saved.html").read_text()):
        assert 'data-scaled="rl_weight"' in text
        assert re.search(rf'"trained_rl_weight": ?\[[^]]*\b{re.escape(str(weight))}\b', text)


def test_what_was_packed_and_not_trained_has_no_weight_as_trained(tmp_path: Path) -> None:
    with pytest.raises(GateRefused):
        rehearse(tmp_path, "held", steps=1, algorithm=ALGORITHMS["dr_grpo"], gate={"type": "rule", "rule": "false"})
    library = StoreReader.at(tmp_path)
    packed_ones = 0
    for found in traces(library, "held"):
        told = tokens(library, found)
        packed_ones += samples(library, found)["row"].count()
        assert told["trained_rl_weight"].null_count() == len(told) and not told["trained"].any()
    assert packed_ones > 0 and (told["rl_weight"] != 0).any()

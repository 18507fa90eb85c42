"""Rollouts that a run took more than one way: what was trained counts, whatever was packed after it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.cli.run_report import describe
from flows.orchestration.states import GateRefused
from flows.queries.batch import packed_step
from flows.queries.request import PageRequest
from flows.queries.row_lineage import identify
from flows.queries.step_history import StepHistory, StepLineage, step_history
from flows.queries.store_reader import StoreReader, recorded_run
from flows.queries.tokens import tokens
from flows.queries.trace import explain, find_trace
from flows.queries.views import relations
from flows.viewer import addresses
from flows.viewer.app import respond
from flows.viewer.pages.trace import trained_in
from storage.read.frames import Frames
from storage.store import open_store
from tasks.filtering import stage as filtering
from tasks.metrics.accounting import REFUSED, TRAINED
from tasks.packing import stage as packing
from tasks.runtime.stage import Stage
from tests.fixtures import rehearsal
from tests.fixtures.rehearsal import rehearse

pytestmark = pytest.mark.engine  # whole runs, each more than once
NOTHING = {"type": "rule", "rule": "false"}


@pytest.fixture
def raised(monkeypatch):
    """Gives a stage another version, as a later program may; what is done from it on then has other keys."""

    def to(stage: Stage, version: int) -> None:
        monkeypatch.setitem(rehearsal.STAND_INS, stage.name, replace(stage, version=version))

    return to


def only(frames: Frames, run: str = "run") -> StepLineage:
    (lineage,) = StepHistory(frames.graph, run).lineages
    return lineage


def look(root: Path) -> Frames:
    return Frames(open_store(root), relations)


def outcomes_of(frames: Frames) -> dict[str, str]:
    return dict(frames["outcomes"].select("trace_id", "outcome").collect().iter_rows())


def refused(root: Path, **changes: Any) -> None:
    with pytest.raises(GateRefused):
        rehearse(root, "run", steps=1, gate=NOTHING, **changes)


def agreed(root: Path, trained: StepLineage) -> None:
    """Everybody who says which batch of the step was trained says the same one."""
    library = StoreReader.at(root)
    of = packed_step(library, "run", 0)
    assert (of.batches.key, of.updates and of.updates.key) == (trained.batches.key, trained.updates.key)
    (step,) = library.history("run").sampled_steps
    assert (step.batches.key, step.updates.key) == (trained.batches.key, trained.updates.key)
    assert {node.key for node in identify(look(root), "run:0:0").roots} == {trained.batches.key}
    store = library.store
    (shown,) = describe(store, "run", recorded_run(store, "run")[1])["steps"]
    took = {work.stage: work.entry.finished_at - work.entry.started_at for work in (trained.batches, trained.updates)}
    assert {stage: shown["metrics"][f"timing/stage/{stage}"] for stage in took} == {
        stage: each.total_seconds() for stage, each in took.items()
    }
    assert {entry.key for entry in step_history(store, "run").steps[0].work.values()} >= {trained.batches.key}
    rows = (
        library.frames("run").rows([trained.batches], "batches").select("sample_ids").collect()["sample_ids"].explode()
    )
    for trace_id, outcome in outcomes_of(look(root)).items():
        found = find_trace(library, "run", trace_id)
        assert tokens(library, found)["trained"].any() == (outcome == TRAINED) == (f"{trace_id}/0" in set(rows))
        assert [each["trained"] for each in trained_in(library, found)] == ([True] if outcome == TRAINED else [])


@pytest.mark.parametrize("stage", [packing.STAGE, filtering.STAGE], ids=lambda stage: stage.name)
def test_what_was_trained_stays_trained_where_the_batch_is_packed_again_and_held_back(tmp_path, raised, stage):
    rehearse(tmp_path, "run", steps=1)
    before = outcomes_of(look(tmp_path))
    first = only(look(tmp_path))
    raised(stage, stage.version + 1)
    refused(tmp_path)
    frames = look(tmp_path)
    assert len(frames.graph.of_run("run").makers("batches")) == 2, "it was packed again"
    assert outcomes_of(frames) == before and TRAINED in before.values() and REFUSED not in before.values()
    (last,) = StepHistory(frames.graph, "run").lineages
    assert (last.batches, last.updates, last.decision) == (first.batches, first.updates, None)
    trace_id = next(name for name, outcome in before.items() if outcome == TRAINED)
    (use,) = explain(StoreReader.at(tmp_path), trace_id)["runs"]
    assert use["outcome"] == TRAINED and use["keys"]["packing"] == first.batches.key
    agreed(tmp_path, last)


def test_a_batch_that_an_old_packing_was_trained_of_last_is_the_one_that_counts(tmp_path, raised):
    rehearse(tmp_path, "run", steps=1)
    first = only(look(tmp_path))
    raised(packing.STAGE, 2)
    rehearse(tmp_path, "run", steps=1)
    raised(packing.STAGE, packing.STAGE.version)
    raised(rehearsal.STAND_INS["training"], 99)
    rehearse(tmp_path, "run", steps=1)
    lineage = only(look(tmp_path))
    assert lineage.batches.key == first.batches.key and lineage.updates.entry.stage_version == 99
    agreed(tmp_path, lineage)


def test_a_rollout_of_a_batch_that_was_done_again_leads_to_no_row_of_the_other(tmp_path, raised):
    rehearse(tmp_path, "run", steps=1)
    first = only(look(tmp_path))
    raised(rehearsal.STAND_INS["rollout"], 99)
    rehearse(tmp_path, "run", steps=1)
    library = StoreReader.at(tmp_path)
    (second,) = (each for each in library.history("run").lineages if each.traces.key != first.traces.key)
    trace_id = next(name for name, outcome in outcomes_of(look(tmp_path)).items() if outcome == TRAINED)
    old, new = (trained_in(library, find_trace(library, "run", trace_id, each.traces.key)) for each in (first, second))
    assert old[0]["trained"] and old[0]["row"] is not None and old[0]["address"] is None
    assert new[0]["trained"] and new[0]["address"] == addresses.row("run", 0, new[0]["row"])
    asked = PageRequest("/", {"run": "run", "trace": trace_id}, {"key": first.traces.key})
    text = bytes(respond("trace", library, asked).body).decode()
    assert "of a batch before the step was done again" in text and "in no batch" not in text

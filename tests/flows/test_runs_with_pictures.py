"""Runs whose rollouts show pictures, without engines: replays, quarantine, lineage, and files for others and back."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from flows.cli.lineage_tree import trace_lineage
from flows.exchange.export import RolloutChoice, export
from flows.exchange.imports import ImportRequest, import_files
from flows.queries.step_history import step_history
from storage.read.frames import Frames
from storage.store import open_store
from tasks.arrays.images import digests_of
from tests.fixtures import fixed, rehearsal
from tests.fixtures.rehearsal import SMALL, rehearse
from tests.fixtures.replays import RLOO, quarantine, replay


def sampled(tables, config, *, step, policy):
    """Stand in for sampling: the fixed rollouts, whose groups show a picture each."""
    groups = fixed.groups(tables["assignments"]).values()
    made = [fixed.with_picture(fixed.group(members, policy, step)) for members in groups]
    tables = {name: pa.concat_tables([each[name] for each in made]) for name in made[0]}
    traces = tables["traces"].to_pylist()
    for row in traces:  # as verifiers has them
        row["rewards"] = json.dumps({"right": {"score": row["reward"], "weight": 1.0}})
    return tables | {"traces": pa.Table.from_pylist(traces, tables["traces"].schema)}


def replayed(store, **asked):
    """Replay step 0; return the name of the replay."""
    session, _ = replay(Path(store.root.address), steps="0", **asked)
    return session.context.run


@pytest.fixture
def store(root, monkeypatch):
    """A store with a recorded run of two steps."""
    rehearsal.play(monkeypatch, rollout=sampled)
    return rehearse(root, "base")


def rows(store, run, table, step=0):
    """The rows of a table that a step of a run made or took over."""
    work = step_history(store, run).steps[step].work
    pieces = {piece for each in work.values() for piece in each.slices_of(table)}
    assert pieces, f"no work of run {run} has table {table}"
    return store.read(list(pieces)).to_pylist()


def test_each_row_has_the_pictures_of_its_samples(store):
    tensors = {row["digest"] for row in rows(store, "base", "image_tensors")}
    placed = rows(store, "base", "batch_images")
    samples = [name for row in rows(store, "base", "batches") for name in row["sample_ids"]]
    assert len(placed) == len(samples) and {row["digest"] for row in placed} == tensors
    assert sum(bool(row["names"]) for row in placed) == len(tensors) == 3, "once for a batch"


def test_a_replay_takes_the_recorded_tensors_and_samples_nothing(store, monkeypatch):
    with monkeypatch.context() as patch:
        rehearsal.play(patch, rollout=lambda *_, **__: pytest.fail("sampled again"))
        runs = replayed(store, overrides=[RLOO]), "base"
    again, base = ([(row["digest"], row["data"]) for row in rows(store, run, "batch_images")] for run in runs)
    assert again == base
    keys = [{entry.key for entry in store.ledger.entries(run=run, stage="packing")} for run in runs]
    assert not keys[0] & keys[1], "it was packed anew"


def test_a_group_in_quarantine_takes_its_picture_out_of_the_batch(store):
    gone = quarantine(store, 0, SMALL["assignment"]["group_size"])
    of_gone = {digest for row in rows(store, "base", "messages") if row["trace_id"] in gone for digest in shown(row)}
    run = replayed(store, from_stage="filtering")
    left = {row["digest"] for row in rows(store, run, "batch_images")}
    assert len(of_gone) == 1 and len(left) == 2 and not left & of_gone


def test_lineage_goes_from_a_row_to_the_rollouts_that_saw_its_pictures(store):
    placed = [row for row in rows(store, "base", "batch_images") if row["row"] == 0]
    found = trace_lineage(Frames(store), "base:0:0", ["up"]).trees["up"]
    traces = {node.id for node in found.facts if node.kind == "trace"}
    of_traces = [row for row in rows(store, "base", "messages") if row["trace_id"] in traces]
    assert placed and {row["digest"] for row in placed} == {digest for row in of_traces for digest in shown(row)}


def shown(message):
    """The digests of the images of a message."""
    return digests_of(message["body"])


@pytest.mark.engine
def test_files_for_others_have_the_pictures_and_come_back_with_their_tensors(store, seeing_model, tmp_path):
    """Exported traces hold the pictures themselves; imported with the model's name they are packed as those sampled."""
    file, target = tmp_path / "traces.jsonl", str(tmp_path / "others")
    export("verifiers", file, RolloutChoice("base", "step < 1"), store=store.root.address, force=False)
    assert file.read_text().count("data:image/png;base64,") == 12 and "stagecoach-image:" not in file.read_text()
    model = {"model": str(seeing_model), "overrides": ["model.renderer=qwen3-vl"]}
    import_files(ImportRequest([file], name="theirs", store=target, **model))
    theirs = open_store(target)
    sampled, made = (
        {(row["digest"], row["name"]): row["shape"] for row in rows(each, run, "image_tensors")}
        for each, run in ((store, "base"), (theirs, "theirs"))
    )
    assert sampled == made, "of the same pictures the same tensors, in form"
    session, _ = replay(Path(target), run="theirs", from_stage="filtering")
    placed, of_base = (
        sorted((row["digest"], row["num_tokens"]) for row in rows(each, run, "batch_images"))
        for each, run in ((theirs, session.context.run), (store, "base"))
    )
    assert placed == of_base

"""The store made for looking at: everything that finds its way through a store finds it there as well."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from benchmarks.viewed.dumps import dump, read_best, read_one, read_rewards
from benchmarks.viewed.watching import Block, Watched
from benchmarks.viewing_store import CREDITED, FORK, RUN, make, settings
from flows.cli.questions import trace_lineage
from flows.queries.derived_tables import DERIVED
from flows.queries.outcomes import explain
from flows.queries.step_history import StepHistory
from storage.read.frames import Frames
from storage.slices import content_digest
from storage.store import Store
from tasks.runtime import execute as parts

STAGES = [
    "advantage",
    "assignment",
    "examples",
    "filtering",
    "metrics",
    "packing",
    "policy_import",
    "rollout",
    "training",
]
OF_STEP = {"assignment": 1, "rollout": 1, "filtering": 1, "advantage": 1, "packing": 1, "training": 1, "metrics": 1}


pytestmark = pytest.mark.engine  # a store of three steps is made: seconds


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    yield make(tmp_path_factory.mktemp("made") / "store", steps=3, rollouts=32, group_size=8, fork=2)


@pytest.fixture(scope="module")
def frames(store: Store) -> Frames:
    return Frames(store, DERIVED)


def outcomes(frames: Frames, run: str) -> pl.DataFrame:
    return frames.run(run).outcomes.collect()


def one(frames: Frames, outcome: str) -> str:
    """The first rollout of the run that met an outcome."""
    found = outcomes(frames, RUN).filter(pl.col("outcome") == outcome).sort("trace_id")
    assert len(found), f"no rollout of the made store is {outcome}"
    name: str = found["trace_id"][0]
    return name


def test_every_stage_of_every_step_is_in_the_ledger_once_with_its_inputs(store: Store) -> None:
    whole = [entry for entry in store.ledger.entries(run=RUN) if not entry.part]
    by_step = {step: Counter(e.stage for e in whole if e.step == step) for step in range(3)}
    begun = {"examples": 1, "policy_import": 1, "evaluation_assignment": 1, "rollout": 2}
    assert by_step == {0: Counter(OF_STEP | begun), 1: Counter(OF_STEP), 2: Counter(OF_STEP)}
    assert sorted({entry.stage for entry in whole} - {"evaluation_assignment"}) == STAGES
    inputs = {e.stage: sorted(e.inputs) for e in whole if e.step == 2}
    assert inputs == {
        "assignment": ["examples"],
        "rollout": ["assignment", "examples", "policy"],
        "filtering": ["rollout"],
        "advantage": ["filtering", "rollout"],
        "packing": ["advantage", "rollout"],
        "training": ["packing", "policy"],
        "metrics": ["advantage", "assignment", "filtering", "packing", "rollout", "training"],
    }


def test_a_step_is_sampled_in_parts_with_the_policy_that_the_step_before_began_with(store: Store) -> None:
    sampled = [e for e in store.ledger.entries(run=RUN, stage="rollout") if "assignment" in e.inputs]
    assert {e.step: len(e.slices("traces")) for e in sampled if not e.part} == {0: 4, 1: 4, 2: 4}
    assert Counter(e.step for e in sampled if e.part) == {0: 4, 1: 4, 2: 4}
    trained = {e.step: e.key for e in store.ledger.entries(run=RUN, stage="training")}
    first = next(e.key for e in store.ledger.entries(run=RUN, stage="policy_import"))
    assert {e.step: e.inputs["policy"] for e in sampled if not e.part} == {0: first, 1: first, 2: trained[0]}


def test_rollouts_end_in_all_ways_and_all_are_accounted_for(frames: Frames) -> None:
    found = Counter(outcomes(frames, RUN)["outcome"].to_list())
    assert found.total() == 3 * 32 + 6
    assert found["evaluated"] == 6
    assert set(found) >= {"trained", "filtered", "errored", "evaluated"}


def test_why_tells_of_a_rollout_that_was_trained_filtered_or_failed(frames: Frames) -> None:
    told = explain(frames, one(frames, "trained"))
    use = next(use for use in told["runs"] if use["run"] == RUN)
    assert use["outcome"] == "trained"
    assert use["policy"] == f"{RUN}:{use['step'] + 1}"
    assert use["samples"] and all(sample["row"] is not None for sample in use["samples"])
    filtered = explain(frames, one(frames, "filtered"))["runs"][0]
    assert filtered["verdict"]["reason"] in filtered["verdict"]["evidence"]
    failed = explain(frames, one(frames, "errored"))
    assert failed["trace"]["reward"] is None
    assert failed["runs"][0]["detail"] == failed["trace"]["error_class"]


def test_the_lineage_of_an_update_reaches_all_its_rollouts(frames: Frames) -> None:
    trained = next(each for each in StepHistory(frames.graph, RUN).lineages if each.updates and each.traces.step == 1)
    assert trained.updates is not None
    rows = outcomes(frames, RUN).filter((pl.col("outcome") == "trained") & (pl.col("key") == trained.traces.key))
    reached = [work.key for work in frames.graph.ancestors(trained.updates.key)]
    assert trained.traces.key in reached
    asked = trace_lineage(frames.run(RUN), f"{RUN}:2", ["up"])
    named = {node.id for node in asked.trees["up"].facts if node.kind == "trace"}
    assert named == set(rows["trace_id"])
    assert named


def test_forks_share_what_they_did_not_do_again(store: Store, frames: Frames) -> None:
    assert [store.runs.events(run)[-1].parent_run for run in (RUN, FORK, CREDITED)] == [None, RUN, RUN]
    base, fork, credited = (StepHistory(frames.graph, run).lineages for run in (RUN, FORK, CREDITED))
    last = next(lineage for lineage in base if lineage.for_training and lineage.traces.step == 2)
    assert credited[0].traces.key == last.traces.key
    assert credited[0].verdicts == last.verdicts
    assert credited[0].samples is not None and credited[0].samples.computed_by == CREDITED
    assert fork[0].updates is not None and fork[0].updates.computed_by == FORK


def test_the_same_arguments_make_the_same_rows(store: Store, tmp_path: Path) -> None:
    again = make(tmp_path / "store", steps=1, rollouts=32, group_size=8)
    for table in ("traces", "messages", "verdicts", "batches"):
        one, two = (rows_of(each, table) for each in (store, again))
        assert content_digest(one) == content_digest(two), table
    assert settings(tmp_path, 1, 32, 8, seed=8).seed == 8


def rows_of(store: Store, table: str) -> pa.Table:
    maker = {"traces": "rollout", "messages": "rollout", "verdicts": "filtering", "batches": "packing"}[table]
    entries = [e for e in store.ledger.entries(run=RUN, stage=maker) if e.step == 0 and not e.part]
    entry = next(e for e in entries if "evaluation_assignment" not in e.inputs)
    return store.read(list(entry.slices(table)))


def test_a_rollout_may_be_as_long_as_is_asked_for(tmp_path: Path) -> None:
    made = Frames(make(tmp_path / "store", steps=1, rollouts=2, group_size=2, messages=101), DERIVED)
    sampled = outcomes(made, RUN).filter(pl.col("outcome") == "trained")["trace_id"].to_list()
    own = (
        made.messages.filter(pl.col("trace_id").is_in(sampled)).select("trace_id", "message", "role", "body").collect()
    )
    assert own.group_by("trace_id").len()["len"].to_list() == [101, 101]
    bodies = own.filter(pl.col("message").is_in([2, 3])).select("role", "body")
    assert all(("tool_calls" in json.loads(body)) == (role == "assistant") for role, body in bodies.iter_rows())


def test_rollouts_as_json_lines_are_those_of_the_tables(frames: Frames, tmp_path: Path) -> None:
    files = dump(frames, RUN, tmp_path / "dumped", range(1, 3))
    assert sorted(files) == [1, 2]
    keys = [lineage.traces.key for lineage in StepHistory(frames.graph, RUN).lineages if lineage.for_training]
    rows = frames.traces.filter(pl.col("key").is_in(keys) & (pl.col("step") == 2)).collect()
    assert read_rewards([files[2]]) == {"step_2.jsonl": pytest.approx(rows["reward"].mean())}
    best = rows["reward"].sort(descending=True, nulls_last=True)[:3].to_list()
    assert [row["reward"] for row in read_best(files[2], 3)] == best
    name = rows["trace_id"][5]
    found = read_one(files[2], name)
    own = frames.messages.filter(pl.col("trace_id") == name).sort("message").collect()
    assert found["messages"] == own.select("role", "content", "token_ids", "mask", "logprobs").to_dicts()


def test_watched_steps_are_compared_with_the_unwatched_around_them() -> None:
    blocks = [Block(False, [1.0, 3.0, 2.0], [1.0] * 3), Block(True, [3.0] * 3, [2.0] * 3), Block(False, [4.0], [1.0])]
    found = Watched(blocks)
    assert found.ratios() == [1.0]
    assert found.noise() == [2.0]
    assert found.of(True) == (3.0, 2.0)
    assert found.of(False) == (2.5, 1.0)


def test_the_pace_of_commits_is_put_back(store: Store) -> None:
    assert parts.PAUSE_RATIO == 3.0

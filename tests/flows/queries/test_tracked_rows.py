"""The rows that are sent of a recorded run, against those that it sends while it goes on."""

from typing import Any

import pyarrow as pa
import pytest

from configs.services import TensorboardTracking
from flows.queries.store_reader import StoreReader, recorded_run
from flows.queries.tracked_rows import TEXT, recorded_rows, sample_rollouts
from flows.reporting.tracking import TrackedRow, TrackingWatcher
from flows.runtime import loop
from flows.runtime.session import record_run
from tasks.runtime.stored_rows import StoredRows
from tests.fixtures import evaluations, rehearsal
from tests.fixtures.builders import message, table, trace
from tests.fixtures.tracked import Written


def test_a_recorded_run_gives_the_rows_that_it_sent_itself(tmp_path):
    root, sink = tmp_path / "store", Written()
    tracking = {"type": "tensorboard", "samples_every": 2, "num_samples": 3}
    session = rehearsal.session_for(root, "a", steps=3, tracking=tracking, evaluation={"every": 2, "num_examples": 6})
    session.watchers = (TrackingWatcher(sink, TensorboardTracking(samples_every=2, num_samples=3)),)
    with evaluations.played(evaluations.Sampler()), record_run(session):
        loop.loop_train(session)
    library = StoreReader.at(root)
    recorded = list(recorded_rows(library, *recorded_run(library.store, "a")))
    # Evaluations may end beside later steps; their own step is the version of their policy.
    assert recorded == [_without_warnings(row) for row in sorted(sink.rows, key=_order)]
    assert any("warnings" in row.figures for row in sink.rows)
    steps = [row for row in recorded if "time/step" in row.figures]
    assert [(row.step, len(row.samples)) for row in steps] == [(0, 3), (1, 0), (2, 3)]
    assert all(len(row.figures) > 60 and row.figures["optim/lr"] > 0 for row in steps)
    evaluated = [row for row in recorded if "eval/version" in row.figures]
    assert [row.step for row in evaluated] == [0, 2]
    assert {name.rpartition("/")[2] for row in evaluated for name in row.figures} >= {"avg@1", "low", "high", "pass@1"}


def _order(row: TrackedRow) -> tuple[int, bool]:
    return row.step, "eval/version" not in row.figures


def _without_warnings(row: TrackedRow) -> TrackedRow:
    """Return a row without the figures of warnings and replies, which are no metrics of the store."""
    figures = {name: value for name, value in row.figures.items() if not name.startswith(("warnings", "figures/"))}
    return row._replace(figures=figures)


def _tables(traces: list[dict[str, Any]], messages: list[dict[str, Any]]) -> dict[str, pa.Table]:
    return {"traces": table("traces", traces), "messages": table("messages", messages)}


def test_samples_are_spread_over_the_rewards():
    rewards = [0.5, None, 1.0, 0.0, 0.25]
    tables = _tables([trace(f"t{number}", reward=reward) for number, reward in enumerate(rewards)], [])
    assert [each["reward"] for each in sample_rollouts(tables, 3)] == [None, 0.25, 1.0]
    assert [each["trace"] for each in sample_rollouts(tables, 9)] == ["t1", "t3", "t4", "t0", "t2"]
    assert len(sample_rollouts(tables, 1)) == 1
    assert sample_rollouts({"traces": tables["traces"]}, 3) == [], "a step without rollouts of its own has none"
    none = StoredRows(tables["messages"].schema, 0, lambda number, columns: pytest.fail("there is no part"))
    assert [each["reply"] for each in sample_rollouts(tables | {"messages": none}, 2)] == ["", ""], "all failed"


def test_a_sample_has_its_prompt_apart_from_its_reply():
    parts = [("system", "Be brief.", False), ("user", "2+2?", False), ("assistant", "4" * 2 * TEXT, True)]
    rows = [
        message("t0", number, parent=number - 1 if number else None, role=role, content=content, sampled=sampled)
        for number, (role, content, sampled) in enumerate(parts)
    ]
    [found] = sample_rollouts(_tables([trace("t0", reward=1.0)], rows[::-1]), 4)
    assert found["prompt"] == "system: Be brief.\nuser: 2+2?"
    assert found["reply"] == "4" * TEXT
    assert found["advantage"] is None

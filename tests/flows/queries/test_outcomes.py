"""Outcomes of all rollouts of a store: they agree with the account of each step, and their sums with the tables."""

from collections import Counter

import polars as pl
import pytest

from flows.queries.outcomes import DERIVED, OUTCOMES, accounting, outcomes
from flows.queries.step_history import StepHistory
from storage.read.frames import Frames
from storage.store import open_store
from tasks.metrics.accounting import EVALUATED, PENDING, REFUSED, TRAINED, account
from tests.flows.queries.every_outcome import UNFIT

RUNS = ("base", "branch", "gated", "regraded", "begun", "hurried")
Figures = dict[tuple[str, str], tuple[int, int, int]]


def of_account(frames: Frames, run: str, step: int) -> Figures:
    """What the account of one step says, from verified rows: traces, tokens, sampled tokens by outcome and detail."""
    lineage = next(c for c in StepHistory(frames.graph, run).lineages if c.traces.step == step and c.for_training)
    assigned = frames.graph.of_run(run).sources(lineage.traces, "assignments")
    works = (lineage.traces, lineage.verdicts, lineage.samples, lineage.batches)
    assigned = assigned or [
        w for w in frames.graph.of_run(run).ancestors(lineage.traces.key) if w.stage == "assignment"
    ]
    tables = ("traces", "verdicts", "samples", "batches")
    read = [frames.store.read(work.slices_of(name)) for work, name in zip(works, tables, strict=True) if work]
    shares = account(frames.store.read(assigned[0].slices_of("assignments")), *read)
    return {
        (share.outcome, share.detail): (share.num_traces, share.input_tokens + share.output_tokens, share.output_tokens)
        for share in shares
    }


def of_table(frames: Frames, run: str, step: int) -> Figures:
    """The same out of the derived table, without what scored a policy."""
    own = accounting(frames).filter(
        (pl.col("run") == run) & (pl.col("step") == step) & (pl.col("outcome") != EVALUATED)
    )
    return {
        (row["outcome"], row["detail"]): (row["num_traces"], row["num_tokens"], row["num_sampled_tokens"])
        for row in own.collect().to_dicts()
    }


@pytest.mark.parametrize(
    ("run", "step"), [("base", 0), ("base", 1), ("branch", 0), ("branch", 1), ("regraded", 0), ("hurried", 0)]
)
def test_the_table_agrees_with_the_account_of_the_step(frames: Frames, run: str, step: int) -> None:
    assert of_table(frames, run, step) == of_account(frames, run, step)
    assert len(of_table(frames, run, step)) >= 4


def test_a_refused_batch_is_trained_in_no_table(frames: Frames) -> None:
    told, expected = of_table(frames, "gated", 0), of_account(frames, "gated", 0)
    assert told.pop((REFUSED, "")) == expected.pop((TRAINED, ""))
    assert told == expected


def test_what_no_stage_has_judged_is_pending(frames: Frames) -> None:
    assert {outcome: num for (outcome, _), (num, *_) in of_table(frames, "begun", 0).items()} == {
        "errored": 3,
        PENDING: 15,
    }


def test_every_kind_of_outcome_is_there(frames: Frames) -> None:
    found = set(accounting(frames).select("outcome", "detail").collect().iter_rows())
    assert found == {
        ("trained", ""),
        ("filtered", "truncated"),
        ("filtered", "zero_advantage"),
        ("errored", "timeout"),
        ("no weight", ""),
        ("quarantined", ""),
        ("stopped", ""),
        ("evaluated", ""),
        ("evaluated", "timeout"),
        ("refused", ""),
        ("pending", ""),
    }


@pytest.mark.parametrize("run", RUNS)
def test_sums_are_those_of_the_rollouts_that_the_run_uses(frames: Frames, rows, run: str) -> None:
    traces = rows(run, "traces")
    again = {row["inputs"]["rollout"] for row in traces if frames.graph.works[row["key"]].stage == "regrade"}
    counted = [row for row in traces if row["key"] not in again]
    (total,) = accounting(frames).filter(pl.col("run") == run).sum().collect().to_dicts()
    assert total["num_traces"] == len(counted) > 0
    assert total["num_sampled_tokens"] == sum(row["num_output_tokens"] for row in counted)
    assert total["num_tokens"] == sum(row["num_input_tokens"] + row["num_output_tokens"] for row in counted)
    spans = ("setup_seconds", "generation_seconds", "scoring_seconds")
    assert total["seconds"] == pytest.approx(sum(row[span] for row in counted for span in spans))
    assert total["num_stale"] == sum(row["staleness"] > 0 for row in counted)


def test_one_row_for_each_rollout_of_a_run(frames: Frames) -> None:
    found = outcomes(frames).collect()
    assert found.columns == list(OUTCOMES)
    assert set(Counter(found.select("run", "key", "trace_id").iter_rows()).values()) == {1}
    unfit = found.filter((pl.col("trace_id") == UNFIT) & (pl.col("step") == 0))
    assert dict(unfit.select("run", "outcome").iter_rows()) == {
        "base": "trained",
        "branch": "trained",
        "gated": "refused",
        "regraded": "quarantined",
        "begun": "pending",
        "hurried": "trained",
    }


def test_of_one_run_and_of_an_empty_store(frames: Frames, tmp_path) -> None:
    alone = outcomes(frames.run("branch")).collect()
    assert alone.equals(outcomes(frames).filter(pl.col("run") == "branch").collect(), null_equal=True)
    empty = Frames(open_store(tmp_path / "store"), DERIVED)
    assert empty.outcomes.collect().is_empty() and empty.accounting.collect().is_empty()
    assert empty.outcomes.collect_schema() == pl.Schema(OUTCOMES)

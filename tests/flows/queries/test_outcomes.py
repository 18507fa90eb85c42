"""Outcomes of all rollouts: they agree with the account of each step, their sums with the tables, and why with both."""

import json
from typing import Any

import polars as pl
import pytest

from flows import cli
from flows.queries.step_history import StepHistory
from flows.queries.store_reader import StoreReader, flat
from flows.queries.trace import explain
from flows.queries.views import relations
from storage.read.frames import Frames
from storage.store import open_store
from tasks.metrics.accounting import EVALUATED, REFUSED, TRAINED, account
from tests.fixtures.rehearsal import play_stages, rehearse, sampled_with
from tests.fixtures.view_schemas import schema
from tests.flows.queries.every_outcome import REASON, RUNS, UNFIT


def of_account(frames, run, step):
    """What the account of one step says, from verified rows: traces by outcome and detail."""
    lineage = next(c for c in StepHistory(frames.graph, run).lineages if c.traces.step == step and c.for_training)
    assigned = frames.graph.of_run(run).sources(lineage.traces, "assignments")
    works = (lineage.traces, lineage.verdicts, lineage.samples, lineage.batches)
    assigned = assigned or [
        w for w in frames.graph.of_run(run).ancestors(lineage.traces.key) if w.stage == "assignment"
    ]
    tables = ("traces", "verdicts", "samples", "batches")
    read = [frames.store.read(work.slices_of(name)) for work, name in zip(works, tables, strict=True) if work]
    return account(frames.store.read(assigned[0].slices_of("assignments")), *read)


def of_table(frames, run, step):
    """The same out of the derived table, without what scored a policy."""
    own = frames["accounting"].filter(pl.col("outcome") != EVALUATED, run=run, step=step)
    return {(row["outcome"], row["detail"]): row["num_traces"] for row in own.collect().to_dicts()}


@pytest.mark.parametrize(
    ("run", "step"), [("base", 0), ("base", 1), ("branch", 0), ("branch", 1), ("regraded", 0), ("hurried", 0)]
)
def test_the_table_agrees_with_the_account_of_the_step(frames, run, step):
    assert of_table(frames, run, step) == of_account(frames, run, step)
    assert len(of_table(frames, run, step)) >= 4


def test_a_refused_batch_is_trained_in_no_table(frames):
    told, expected = of_table(frames, "gated", 0), of_account(frames, "gated", 0)
    assert told.pop((REFUSED, "")) == expected.pop((TRAINED, ""))
    assert told == expected


def test_every_kind_of_outcome_is_there(frames):
    found = set(frames["accounting"].select("outcome", "detail").collect().iter_rows())
    assert found == {
        ("trained", ""),
        ("filtered", "truncated"),
        ("filtered", "zero_advantage"),
        ("errored", "timeout"),
        ("no weight", ""),
        ("quarantined", ""),
        ("stopped", ""),
        ("stale", ""),
        ("evaluated", ""),
        ("evaluated", "timeout"),
        ("refused", ""),
        ("pending", ""),
    }


@pytest.mark.parametrize("run", RUNS)
def test_sums_are_those_of_the_rollouts_that_the_run_uses(frames, rows, run):
    traces = rows(run, "traces")
    again = {row["inputs"]["rollout"] for row in traces if frames.graph.works[row["key"]].stage == "regrade"}
    counted = [row for row in traces if row["key"] not in again]
    (total,) = frames["accounting"].filter(run=run).sum().collect().to_dicts()
    assert total["num_traces"] == len(counted) > 0
    assert total["num_sampled_tokens"] == sum(row["num_output_tokens"] for row in counted)
    assert total["num_tokens"] == sum(row["num_input_tokens"] + row["num_output_tokens"] for row in counted)
    spans = ("setup_seconds", "generation_seconds", "scoring_seconds")
    assert total["seconds"] == pytest.approx(sum(row[span] for row in counted for span in spans))
    assert total["num_stale"] == sum(row["staleness"] > 0 for row in counted)


def test_of_one_run_and_of_an_empty_store(frames, tmp_path):
    alone = frames.run("branch")["outcomes"].collect()
    assert alone.equals(frames["outcomes"].filter(run="branch").collect(), null_equal=True)
    empty = Frames(open_store(tmp_path / "store"), relations)
    assert empty["outcomes"].collect().is_empty() and empty["accounting"].collect().is_empty()
    assert empty["outcomes"].collect_schema() == schema("outcomes")


def use_in(frames, trace, run):
    """What one run made of a rollout, by dotted name."""
    (use,) = explain(StoreReader(frames.store), trace, run)["runs"]
    return dict(flat(use))


def test_a_trained_rollout_has_batch_row_update_and_policy(frames, rows):
    batch = next(row for row in rows("base", "batches") if f"{UNFIT}/0" in row["sample_ids"])
    credit = next(row for row in rows("base", "samples") if row["trace_id"] == UNFIT)
    assert (
        use_in(frames, UNFIT, "base").items()
        >= {
            **{"outcome": "trained", "policy": "base:1", "keys.packing": batch["key"], "samples.0.row": batch["row"]},
            **{"samples.0.update": batch["update"], "samples.0.advantage": credit["advantage"]},
            **{"group.group_id": "0-0", "group.num_rollouts": 6, "group.num_errored": 1},
        }.items()
    )


EVIDENCE = "verdict.evidence"


@pytest.mark.parametrize(
    ("trace", "run", "values"),
    [
        ("trace-0-0-1", "base", {"detail": "truncated", f"{EVIDENCE}.truncated.stop_condition": "stop"}),
        ("trace-0-0-2", "base", {"samples.0.sample_id": "trace-0-0-2/0", "samples.1.sample_id": "trace-0-0-2/1"}),
        ("trace-0-1-0", "base", {"detail": "zero_advantage", f"{EVIDENCE}.zero_advantage.members": 4}),
        ("trace-0-0-3", "base", {"outcome": "errored", "detail": "timeout"}),
        ("trace-0-2-0", "base", {"outcome": "no weight", "samples.0.sample_id": "trace-0-2-0/0"}),
        (UNFIT, "regraded", {"outcome": "quarantined", f"{EVIDENCE}.quarantined.reason": REASON}),
        (UNFIT, "begun", {"outcome": "pending", "verdict": None, "state": "finished"}),
        ("trace-0-3-1", "hurried", {"outcome": "stopped", "group.num_rollouts": 6, "group.num_stopped": 5}),
        ("trace-0-0-4", "gated", {"outcome": "refused", "decision.gate": "rule", "decision.decided_by": "rule"}),
    ],
)
def test_what_decided_against_it_and_with_which_numbers(frames, trace, run, values):
    assert use_in(frames, trace, run).items() >= values.items()


def test_a_seat_that_never_moved_is_left_out_as_untrainable_with_its_reward(tmp_path):
    """The first rollout of a run is of such a seat: nothing failed, and there is nothing of it to train on."""

    def silent(number: int, row: dict[str, Any]) -> dict[str, Any]:
        return {"num_turns": 0, "num_output_tokens": 0, "reward": 1.0} if number == 0 else {}

    with play_stages(rollout=sampled_with(silent)):
        store = rehearse(tmp_path / "store", "base", steps=1)
    frames = Frames(store, relations)
    (row,) = frames["outcomes"].filter(outcome="filtered", detail="untrainable").collect().to_dicts()
    assert explain(StoreReader(frames.store), row["trace_id"])["trace"]["reward"] == 1
    assert of_table(frames, "base", 0) == of_account(frames, "base", 0)


def test_a_rollout_that_was_scored_again_says_both_rewards(frames, rows):
    before = next(row["reward"] for row in rows("base", "traces") if row["trace_id"] == "trace-0-0-4")
    use = use_in(frames, "trace-0-0-4", "regraded")
    assert (use["regrade.reward_before"], use["regrade.reward"]) == (before, before + 0.5)


def test_the_command_for_people_and_for_programs(root, capsys):
    assert cli.main(["why", UNFIT, "--store", str(root)]) == 0
    printed = capsys.readouterr().out
    assert f"\ntrace_id: {UNFIT}\n" in printed and f"reason: {REASON}\n" in printed
    assert "run: regraded\nstate: finished\nstep: 0\noutcome: quarantined\n" in printed
    assert cli.main(["why", UNFIT, "--run", "branch", "--json", "--store", str(root)]) == 0
    (use,) = json.loads(capsys.readouterr().out)["runs"]
    assert (use["run"], use["policy"]) == ("branch", "branch:1")

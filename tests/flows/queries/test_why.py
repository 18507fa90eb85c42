"""Why a rollout was trained on or not: a sentence for every outcome, and the outcomes table says the same."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from flows import cli
from flows.queries.outcomes import explain, outcomes
from flows.queries.sentences import SENTENCES, head, sentence
from storage.read.frames import Frames
from tests.flows.queries.every_outcome import REASON, UNFIT


def told(frames: Frames, trace: str, run: str, step: int = 0) -> str:
    """What is said of a rollout in one run."""
    found = explain(frames, trace)
    (use,) = [use for use in found["runs"] if (use["run"], use["step"]) == (run, step)]
    return sentence(found, use)


def test_the_outcomes_table_says_the_same_of_every_rollout(frames: Frames) -> None:
    table = outcomes(frames).filter(pl.col("step") == 0).collect()
    for trace in sorted(set(table["trace_id"])):
        found = explain(frames, trace)
        uses = {(use["run"], use["step"], use["outcome"], use["detail"]) for use in found["runs"] if use["step"] == 0}
        own = table.filter(pl.col("trace_id") == trace)
        assert uses == set(own.select("run", "step", "outcome", "detail").iter_rows())
        assert all(sentence(found, use) for use in found["runs"])
    assert set(table["outcome"]) == set(SENTENCES) - {"evaluated", "expired"}, "expired: test_retired_rows"


def test_a_trained_rollout_has_batch_row_update_and_policy(frames: Frames, rows: Any) -> None:
    said = told(frames, UNFIT, "base")
    credit = next(row for row in rows("base", "samples") if row["trace_id"] == UNFIT)
    batch = next(row for row in rows("base", "batches") if f"{UNFIT}/0" in row["sample_ids"])
    assert f"Run base trained on it at step 0: sample {UNFIT}/0 (advantage {credit['advantage']:.4g}," in said
    assert f"in row {batch['row']} of batch {batch['key'][:8]}, update {batch['update']}" in said
    assert "That made policy base:1." in said
    assert "Its group 0-0 has 6 rollouts, 1 failed: rewards from " in said


def test_a_rollout_with_two_branches_has_two_samples(frames: Frames) -> None:
    said = told(frames, "trace-0-0-2", "base")
    assert "sample trace-0-0-2/0" in said and "sample trace-0-0-2/1" in said


@pytest.mark.parametrize(
    ("trace", "run", "words"),
    [
        ("trace-0-0-1", "base", "filter truncated left it out (stop condition stop, num output tokens "),
        ("trace-0-1-0", "base", "filter zero_advantage left it out (spread 0, reward 1, members 4)"),
        ("trace-0-0-3", "base", "an error of class timeout (TimeoutError: too slow). Failed rollouts are in no"),
        ("trace-0-2-0", "base", "it was kept, but none of its tokens has a weight in the loss (trace-0-2-0/0:"),
        (UNFIT, "regraded", f"it is in quarantine: {REASON}."),
        (
            UNFIT,
            "begun",
            "Run begun has not trained on it: of step 0 nothing is done after rollout. The run's last event is: fini",
        ),
        (
            "trace-0-3-1",
            "hurried",
            "it was stopped after 1.5 s: enough groups of environment 'reverse_text' had ended (",
        ),
        ("trace-0-3-1", "hurried", "Its group 0-3 has 6 rollouts, 5 stopped: rewards from "),
        ("trace-0-0-4", "gated", "the rule gate held back the whole batch. Decided by rule: reward_mean < 0 does not"),
    ],
)
def test_what_decided_against_it_and_with_which_numbers(frames: Frames, trace: str, run: str, words: str) -> None:
    assert words in told(frames, trace, run)


def test_a_rollout_that_was_scored_again_says_both_rewards(frames: Frames, rows: Any) -> None:
    before = next(row["reward"] for row in rows("base", "traces") if row["trace_id"] == "trace-0-0-4")
    said = told(frames, "trace-0-0-4", "regraded")
    assert f"It was scored again: its reward was {before:.4g} and is {before + 0.5:.4g}." in said


def test_an_evaluation_says_which_policy_was_scored(frames: Frames) -> None:
    trace = outcomes(frames).filter((pl.col("outcome") == "evaluated") & (pl.col("step") == 2)).collect()["trace_id"][0]
    assert told(frames, trace, "base", 2).startswith("Run base sampled it to score policy base:2, not to train on.")


def test_the_command_for_people_and_for_programs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["why", UNFIT, "--store", str(root)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"Trace {UNFIT}: agent agent on example reverse_text/example-")
    assert "It is in quarantine" in printed and REASON in printed
    assert cli.main(["why", UNFIT, "--run", "branch", "--json", "--store", str(root)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [use["run"] for use in found["runs"]] == ["branch"]
    assert found["runs"][0]["policy"] == "branch:1" and head(found).endswith("Used by: branch.")

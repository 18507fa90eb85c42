"""Regrade: traces with the scores of today, and a row that says what they were."""

import base64
import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.schemas.contract import RowPlace, check_rows
from storage.schemas.stage_tables import REGRADES, TRACES
from tasks.inference.grading.client import SCORES
from tasks.inference.trace_rows.images import extract_images, restore_images
from tasks.rollout.regrade import STAGE, GradingBreach
from tests.fixtures.builders import example, exchange, failed, table, trace, view
from tests.fixtures.stages import regrade, tables_of


def score(trace_id, reward=1.0, **others):
    """A row of scores that went well."""
    fine = {"rewards": '{"r":1}', "metrics": '{"m":2}', "info": '{"i":3}', "seconds": 0.25}
    return dict.fromkeys(SCORES.names) | fine | {"trace_id": trace_id, "reward": reward} | others


EXAMPLES = {"examples": table("examples", [example()])}
FAULT = {"error_class": "environment", "error_type": "TaskError", "error_message": "no", "error_traceback": "where"}


class Graders:
    """Answers with scores made by hand."""

    def __init__(self, *rows):
        self.rows = rows

    def scores(self, examples, traces, messages):
        assert (examples.num_rows, messages.num_rows) == (1, 2 * traces.num_rows)
        return pa.Table.from_pylist(list(self.rows), schema=SCORES)


def regraded(traces, *scores):
    made = regrade(tables_of(traces) | EXAMPLES, view(STAGE), graders=Graders(*scores))
    for name, contract in (("traces", TRACES), ("regrades", REGRADES)):
        check_rows(made[name], contract, RowPlace(name))
    return made["traces"].to_pylist(), made["regrades"].to_pylist()


def test_images_in_notes_of_today_are_kept_by_reference_where_they_were_recorded():
    """And a note that looks like a reference is none: whoever reads the images back finds it as it was."""
    seen, new = (f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (b"seen", b"new"))
    note = json.dumps({"shown": seen, "drawn": new, "odd": "stagecoach-image:x"}, separators=(",", ":"))
    record = json.dumps({"task": {"data": {"picture": seen}}}, separators=(",", ":"))
    recorded = extract_images(table("traces", [trace("a", record=record)]), table("messages", exchange("a")))
    found = regrade(recorded | EXAMPLES, view(STAGE), graders=Graders(score("a", info=note)))["traces"]
    assert seen not in found["info"][0].as_py() and new in found["info"][0].as_py()
    assert found["record"].to_pylist() == recorded["traces"]["record"].to_pylist()
    (whole,) = restore_images(found, recorded["messages"], recorded["images"])["traces"].to_pylist()
    assert (whole["info"], whole["record"]) == (note, record)


def test_traces_have_the_scores_of_today_and_everything_else_as_it_was():
    before = [trace("a", reward=0.5, rewards='{"r":0}'), trace("b", reward=1.0)]
    traces, regrades = regraded(before, score("b"), score("a", 0.75))
    new = {"rewards": '{"r":1}', "metrics": '{"m":2}', "info": '{"i":3}', "scoring_seconds": 0.25}
    assert traces == [before[0] | new | {"reward": 0.75}, before[1] | new]
    changes = [(row["reward_before"], row["reward"], row["changed"]) for row in regrades]
    assert changes == [(0.5, 0.75, True), (1.0, 1.0, False)]
    assert regrades[0]["rewards_before"] == '{"r":0}' and regrades[0]["seconds"] == 0.25


def test_errored_rollouts_stay_as_they_are_and_are_not_scored():
    before = [failed("a"), trace("b")]
    traces, regrades = regraded(before, score("b"))
    assert traces[0] == before[0] and [row["trace_id"] for row in regrades] == ["b"]
    with pytest.raises(GradingBreach, match=r"1 traces can be scored.* first a"):
        regraded(before, score("a"), score("b"))


def test_a_trace_whose_scoring_fails_becomes_an_errored_one():
    traces, regrades = regraded([trace("a", reward=0.5)], score("a", None, **FAULT))
    assert traces[0] == trace("a", reward=None, rewards='{"r":1}', metrics='{"m":2}', info='{"i":3}', **FAULT) | {
        "scoring_seconds": 0.25
    }
    (row,) = regrades
    assert (row["changed"], row["error_type"], row["error_message"]) == (True, "TaskError", "no")


@pytest.mark.parametrize("scores", [[], [score("a"), score("a")], [score("a"), score("z")]])
def test_every_trace_is_scored_once(scores):
    with pytest.raises(GradingBreach, match="what was recorded is as it was"):
        regraded([trace("a")], *scores)


@given(st.lists(st.tuples(st.sampled_from([None, 0.0, 1.0]), st.sampled_from([None, 0.0, 1.0])), max_size=8))
def test_changed_says_whether_the_reward_is_another_or_appeared_or_went(rewards):
    before = [trace(f"t{n}", reward=old) for n, (old, _) in enumerate(rewards)]
    traces, regrades = regraded(before, *(score(f"t{n}", new) for n, (_, new) in enumerate(rewards)))
    assert [row["reward"] for row in traces] == [new for _, new in rewards]
    assert [row["changed"] for row in regrades] == [old != new for old, new in rewards]

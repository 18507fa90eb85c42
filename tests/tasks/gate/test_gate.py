"""The gate stage: a row for every decision, whoever made it, and what a person is shown."""

import json
from typing import Any

import pytest

from tasks.gate.stage import STAGE, Answer, Question, shown_rollouts
from tests.fixtures.builders import exchange, message, table, trace, verdict, view

TRACES = [trace("t0", reward=0.25), trace("t1", reward=1.0), trace("t2", reward=0.0), trace("t3", reward=None)]
TABLES = {
    "traces": table("traces", TRACES),
    "messages": table("messages", [row for each in TRACES for row in exchange(each["trace_id"])]),
    "verdicts": table("verdicts", [verdict(each["trace_id"]) for each in TRACES]),
    "samples": table("samples", []),
    "batches": table("batches", []),
}


def decide(gate: dict[str, Any], answer: Answer | None = None) -> tuple[dict[str, Any], list[Question]]:
    """Return the decision and what was asked."""
    asked: list[Question] = []

    def approve(question: Question) -> Answer:
        asked.append(question)
        assert answer is not None, "nobody should be asked"
        return answer

    made = STAGE.function(TABLES, view(STAGE, gate=gate), step=3, key="k", approve=approve)
    (row,) = made["decisions"].to_pylist()
    return row, asked


@pytest.mark.parametrize(("least", "approved", "verb"), [(0.4, True, "holds"), (0.5, False, "does not hold")])
def test_a_rule_decides_alone(least: float, approved: bool, verb: str) -> None:
    rule = f"reward_mean > {least}"
    row, asked = decide({"type": "rule", "rule": rule})
    assert (row["gate"], row["approved"], row["rule"], row["decided_by"]) == ("rule", approved, rule, "rule")
    assert row["reason"] == f"{rule} {verb}: reward_mean 0.416667"
    assert json.loads(row["figures"])["num_traces"] == 4 and json.loads(row["figures"])["fill"] is None
    assert not asked and row["asked_at"] <= row["decided_at"]


@pytest.mark.parametrize("approved", [True, False])
def test_a_person_is_shown_the_batch_and_decides(approved: bool) -> None:
    row, (question,) = decide({"type": "pause", "timeout_seconds": 5.0}, Answer(approved, "Ada", "looks right"))
    assert (row["gate"], row["approved"], row["rule"]) == ("pause", approved, None)
    assert (row["decided_by"], row["reason"]) == ("Ada", "looks right")
    assert (question.step, question.key, question.timeout_seconds) == (3, "k", 5.0)
    assert question.figures["reward_mean"] == pytest.approx(1.25 / 3)
    assert [(shown.label, shown.trace_id) for shown in question.rollouts] == [
        ("best", "t1"),
        ("median", "t0"),
        ("worst", "t2"),
    ]


def test_rollouts_are_shown_with_their_texts_in_order() -> None:
    messages = [message("t0", 1, sampled=True, content="olleh"), message("t0", 0, content="hello"), message("t1")]
    (shown,) = shown_rollouts(table("traces", [trace("t0")]), table("messages", messages))
    assert shown.messages == (("user", "hello"), ("assistant", "olleh"))


def test_rollouts_of_a_frozen_opponent_are_not_shown() -> None:
    rows = [trace("ours", reward=0.0), trace("theirs", reward=1.0, agent="rival", trainable=False)]
    assert [each.trace_id for each in shown_rollouts(table("traces", rows), table("messages", []))] == ["ours"]


@pytest.mark.parametrize(("num_scored", "labels"), [(0, []), (1, ["best"]), (2, ["best", "worst"])])
def test_no_rollout_is_shown_twice(num_scored: int, labels: list[str]) -> None:
    traces = [trace(f"t{number}", reward=float(number)) for number in range(num_scored)] + [trace("x", reward=None)]
    shown = shown_rollouts(table("traces", traces), table("messages", []))
    assert [each.label for each in shown] == labels

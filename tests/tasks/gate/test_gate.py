"""The gate stage: a row for every decision, whoever made it, and what a person is shown."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.replay import RuleGate
from tasks.gate.stage import (
    ALONE,
    STAGE,
    RuleFailed,
    by_rule,
    describe_figures,
    holds,
    require_rule,
    shown_rollouts,
    warning_figures,
)
from tasks.metrics.figures import MEANINGS, score_figures
from tasks.runtime.services import Answer
from tests.fixtures.builders import exchange, message, table, trace, verdict, view
from tests.fixtures.stages import Call

TRACES = [trace("t0", reward=0.25), trace("t1", reward=1.0), trace("t2", reward=0.0), trace("t3", reward=None)]
TABLES = {
    "traces": table("traces", TRACES),
    "messages": table("messages", [row for each in TRACES for row in exchange(each["trace_id"])]),
    "verdicts": table("verdicts", [verdict(each["trace_id"]) for each in TRACES]),
    "samples": table("samples", []),
    "batches": table("batches", []),
}
UNKNOWN = dict.fromkeys(MEANINGS)


def decide(gate, answer=None):
    """Return the decision and what was asked."""
    asked = []

    def approve(question):
        asked.append(question)
        assert answer is not None, "nobody should be asked"
        return answer

    made = Call(STAGE)(TABLES, view(STAGE, gate=gate), step=3, key="k", approve=approve)
    (row,) = made["decisions"].to_pylist()
    return row, asked


@pytest.mark.parametrize(("least", "approved", "verb"), [(0.4, True, "holds"), (0.5, False, "does not hold")])
def test_a_rule_decides_alone(least, approved, verb):
    rule = f"reward_mean > {least}"
    row, asked = decide({"type": "rule", "rule": rule})
    assert (row["gate"], row["approved"], row["rule"], row["decided_by"]) == ("rule", approved, rule, "rule")
    assert row["reason"] == f"{rule} {verb}: reward_mean 0.416667"
    assert json.loads(row["figures"])["num_traces"] == 4 and json.loads(row["figures"])["fill"] is None
    assert not asked and row["asked_at"] <= row["decided_at"]


def test_a_rule_may_name_warnings_of_the_steps_before_and_of_the_batch():
    figures = {"output_tokens_mean": 90.0, "truncated_ratio": 0.0, "errored_ratio": None, "reward_mean": 0.5}
    pairs = zip([30.0] * 6 + [90.0], [1.0] * 5 + [4.0] * 2, strict=True)
    before = [{("all", "num_output_tokens"): a, ("", "updates/entropy/mean"): b} for a, b in pairs]
    held = warning_figures(before, figures)
    assert held["warnings"] == 2.0 and held["warning_length_grows"] == held["warning_entropy_grows"] == 1.0
    assert held["warning_errors"] == 0.0 and {*held} < {*ALONE}
    assert warning_figures((), figures)["warnings"] == 0.0, "nothing is unusual at first"
    require_rule("warnings = 0 and warning_reward_part = 0")
    with pytest.raises(ConfigError, match="warning_repetition"):
        require_rule("warning_repetition = 0")  # its figure is in no recorded metrics: it would always pass
    assert decide({"type": "rule", "rule": "warnings = 0"})[0]["approved"]
    assert "warnings" not in json.loads(decide({"type": "rule", "rule": "num_traces > 1"})[0]["figures"])


@pytest.mark.parametrize("approved", [True, False])
def test_a_person_is_shown_the_batch_and_decides(approved):
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


def test_rollouts_are_shown_with_their_texts_in_order():
    messages = [message("t0", 1, sampled=True, content="olleh"), message("t0", 0, content="hello"), message("t1")]
    (shown,) = shown_rollouts(table("traces", [trace("t0")]), table("messages", messages))
    assert shown.messages == (("user", "hello"), ("assistant", "olleh"))


def test_rollouts_of_a_frozen_opponent_are_not_shown():
    rows = [trace("ours", reward=0.0), trace("theirs", reward=1.0, agent="rival", trainable=False)]
    assert [each.trace_id for each in shown_rollouts(table("traces", rows), table("messages", []))] == ["ours"]


@pytest.mark.parametrize(("num_scored", "labels"), [(0, []), (1, ["best"]), (2, ["best", "worst"])])
def test_no_rollout_is_shown_twice(num_scored, labels):
    traces = [trace(f"t{number}", reward=float(number)) for number in range(num_scored)] + [trace("x", reward=None)]
    shown = shown_rollouts(table("traces", traces), table("messages", []))
    assert [each.label for each in shown] == labels


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("trainable_ratio > 0.1", True),
        ("trainable_ratio > 0.25", False),
        ("trainable_ratio >= 0.25 and num_rows = 3", True),
        ("reward_mean > 0", False),  # null: nothing was scored
        ("not (reward_mean > 0)", False),  # null as well, and not its opposite
        ("reward_mean is null", True),
        ("coalesce(reward_mean, 1) > 0.5 -- with a remark", True),
        ("num_kept / num_traces between 0.2 and 0.3", False),
    ],
)
def test_a_rule_holds_where_it_is_true(rule, expected):
    require_rule(rule)
    require_rule(HACKED)
    figures = UNKNOWN | {"trainable_ratio": 0.25, "num_rows": 3, "num_kept": 2, "num_traces": 4}
    assert holds(rule, figures) is expected


SCORES = json.dumps({name: {"score": 0.5, "weight": 1.0} for name in ("train", "held")})
SCORED = [trace(name, reward=1.0, rewards=SCORES) for name in ("t0", "t1")]
HACKED = "not coalesce(score_trend['train'] > 0.5 and score_trend['held'] <= 0, false)"


def decision_after(train, held, rule=HACKED, window=5):
    """The answer of a rule after steps with some means of two scores; the batch's own are 0.5."""
    before = [{"train": a, "held": b} for a, b in zip(train, held, strict=True)]
    return by_rule(rule, score_figures(table("traces", SCORED), before, window))


@pytest.mark.parametrize(
    ("train", "held", "approved"),
    [
        ([0.1, 0.2, 0.3, 0.4], [0.9, 0.8, 0.7, 0.6], False),
        ([0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 0.5, 0.5], False),
        ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4], True),
        ([0.4, 0.1, 0.3, 0.2], [0.9, 0.8, 0.7, 0.6], True),
        ([0.2, 0.3, 0.4], [0.8, 0.7, 0.6], True),  # too few steps
        ([0.0, 0.9, 0.8, 0.7, 0.6], [0.9, 0.9, 0.8, 0.7, 0.6], True),  # of the last five steps alone
    ],
)
def test_a_rule_stops_where_one_score_rises_and_a_held_out_one_does_not(train, held, approved):
    answer = decision_after(train, held)
    assert answer.approved is approved
    assert "score_trend/train" in answer.reason and "score_mean" not in answer.reason


def test_the_mean_of_a_score_is_a_figure_without_any_step_before():
    assert decision_after([], [], "score_mean['held'] = 0.5", 0).approved


def test_a_rule_about_a_score_that_nobody_gave_fails_with_the_names():
    with pytest.raises(RuleFailed, match=r"has score_mean/hedl; the named rewards are held, train\."):
        decision_after([], [], "coalesce(score_mean['hedl'] > 0, true)", 0)


def test_a_trend_needs_a_window():
    with pytest.raises(ValueError, match=r"set gate\.window to at least 5"):
        RuleGate(rule=HACKED, window=4)


comparisons = st.tuples(
    st.sampled_from(sorted(MEANINGS)), st.sampled_from(["<", "<=", "=", "<>", ">=", ">"]), st.integers(-2, 2)
)
SIGNS = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    "=": lambda a, b: a == b,
    "<>": lambda a, b: a != b,
    ">=": lambda a, b: a >= b,
    ">": lambda a, b: a > b,
}


@settings(max_examples=8)  # each one opens a database
@given(
    st.dictionaries(st.sampled_from(sorted(MEANINGS)), st.none() | st.integers(-2, 2)),
    st.lists(comparisons, min_size=1, max_size=3),
)
def test_nothing_unknown_is_taken_for_true(known, parts):
    figures = UNKNOWN | known
    rule = " and ".join(f"{name} {sign} {value}" for name, sign, value in parts)
    true = all(figures[name] is not None and SIGNS[sign](figures[name], value) for name, sign, value in parts)
    assert holds(rule, figures) is true
    denied = all(figures[name] is not None and not SIGNS[sign](figures[name], value) for name, sign, value in parts)
    assert holds(" and ".join(f"not ({part})" for part in rule.split(" and ")), figures) is denied


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("trainable_ratoi > 0.1", 'column "trainable_ratoi" not found'),
        ("trainable_ratio >", "syntax error"),
        ("", "neither true nor false"),
        ("trainable_ratio", "of type DOUBLE"),
        ("num_rows", "of type BIGINT"),
        ("fill > 0) from batch; select (true", "more than one statement"),
        ("fill > 0; drop table batch", "syntax error"),
        ("unnest([true, false])", "more than one value"),
        ("(select count(*) from read_csv('/etc/hostname')) > 0", "disabled by configuration"),
        ("(select count(*) from read_csv('.tmp/x.csv')) > 0", "disabled by configuration"),
    ],
)
def test_what_is_no_condition_over_the_figures_is_refused_with_their_names(rule, problem):
    with pytest.raises(ConfigError, match="over: num_traces, num_groups, reward_mean") as caught:
        require_rule(rule)
    assert problem in str(caught.value) and "nothing was started" in str(caught.value)


def test_a_rule_that_fails_on_the_figures_at_hand_says_which():
    rule = "cast(num_rows as tinyint) > 1"
    require_rule(rule)
    with pytest.raises(RuleFailed, match=r"num_rows 1000: .*out of range") as caught:
        holds(rule, UNKNOWN | {"num_rows": 1000})
    assert "Nothing was trained" in str(caught.value)


def test_a_message_names_the_figures_of_the_rule():
    figures = UNKNOWN | {"fill": 0.123456789, "num_rows": 3}
    assert describe_figures("fill > 0.5 or reward_mean > 1", figures) == "reward_mean null, fill 0.123457"

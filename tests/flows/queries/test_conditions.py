"""Conditions on rollouts: what is found by a text, an expression or a condition, and what is said of none."""

import resource
from threading import Event

import polars as pl
import psutil
import pyarrow as pa
import pytest

from flows.queries.condition_process import INDEX, LIMITS, ConditionFailed, true_rows
from flows.queries.conditions import FLAGS, BadCondition, Condition, matching_rows, matching_traces, search_condition
from storage.read.query_limits import OF_MACHINE, Bounds
from tests.fixtures.view_schemas import schema

ROWS = pl.DataFrame(
    {
        "step": [1, 2, 3, 4],
        "reply": ["a<rev></rev>b", "Hello world", None, "100% a_b"],
        "note": [None, None, "said Nothing", None],
        "reward": [1.0, 0.0, None, 0.5],
        "length": [3, 4, 5, 6],
        "is_truncated": [True, False, True, False],
        "rewards": ['{"form": {"score": 0.5, "weight": 1}}', "{}", "{}", "{}"],
        "environment": ["x", "x", "y", "y"],
    }
)
NO_CONDITIONS = (
    *("true); select (1", "true) order by (1", "true order by 1", "true) union select 1 where (true", "", " "),
    *("true, false", "true from rollouts"),
)


def found(condition: Condition) -> list[int]:
    steps: list[int] = matching_rows(ROWS, condition)["step"].to_list()
    return steps


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("reward > 0.8 and length < 20 and reply ~ '<rev></rev>'", [1]),
        ("REWARD is null -- those that were not scored", [3]),
        ("reward between 0 and 0.6", [2, 4]),
        ("step in (1, 2) and not reply ilike '%HELLO%'", [1]),
        ("(rewards->>'$.form.score')::double > 0.2", [1]),
        ("length(reply) > 8", [1, 2]),
        ("is_truncated", [1, 3]),
        ("not is_truncated", [2, 4]),
        ("len([x for x in [step, 4] if x > 2]) = 2", [3, 4]),
    ],
)
def test_conditions(text, steps):
    assert found(search_condition(text)) == found(Condition(text)) == steps, "the search field takes what --where does"


def test_columns_that_are_true_or_false_are_conditions_by_themselves():
    assert {*FLAGS} == {name for name, kind in schema("rollouts").items() if kind == pl.Boolean}


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("<rev></rev>", [1]),
        ("hello WORLD", [2]),
        ("100%", [4]),
        ("/h.l+o/i", [2]),
        ("/h.l+o/", []),
        ("reward", []),
        ('"step = 1"', []),
        ("'hello'", [2]),
        ("it's", []),
        ("NOTHING", [3]),
        ("true); select (reward", []),
        ("the reward is 42", []),
        ("it is (a)", []),
        ("<b>12</b>", []),
        ("step-by-step", []),
    ],
)
def test_texts_are_looked_for_in_replies_and_notes_and_expressions_in_replies(text, steps):
    condition = search_condition(text)
    assert condition.columns == ({"reply"} if text.startswith("/") else {"reply", "note"})
    assert found(condition) == steps


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rewrd > 0.8", 'column "rewrd" not found'),
        ("replay ~ 'x'", "The nearest columns are reply"),
        ('reward == 1 and environment == "y"', "text in single quotes"),
        ("reward >", "syntax error"),
        ("reward > 'much'", "Could not convert"),
        ("reply ~ '('", "missing"),
        ("reward in (select 1 from read_csv('/etc/passwd'))", "disabled by configuration"),
        *((text, "A condition is SQL") for text in NO_CONDITIONS),
        ("(" * 9000 + "1" + ")" * 9000 + " > 0", "depth"),
    ],
)
def test_nothing_but_one_condition_and_mistakes_are_explained(text, said):
    with pytest.raises(BadCondition, match=said.replace("(", r"\(")):
        found(Condition(text))


@pytest.mark.parametrize(
    ("sql", "limits", "message"),
    [
        ("(select count(*) from range(100000000000)) > 0", Bounds(seconds=1), "takes longer than 1 s"),
        ("len(range(3000000000)) > 0", LIMITS, "needs more than 0.5 GiB of memory"),
        ("len(repeat('x', 3000000000)) > 0", LIMITS, "needs more than 0.5 GiB of memory"),
        ("(select len(list(range)) from range(len(range(3000000000)))) > 0", LIMITS, "needs more than 0.5 GiB"),
    ],
)
def test_a_condition_ends_at_its_limits(sql, limits, message):
    with pytest.raises(ConditionFailed, match=message):
        true_rows(pa.table({INDEX: [0]}), sql, limits=limits)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 * 2**20, "KiB of the largest child"


def test_a_condition_has_the_limits_of_the_viewer_or_those_that_a_caller_gives(monkeypatch):
    limits = []

    def spied(rows, sql, reader_gone, bounds):
        limits.append(bounds)
        return true_rows(rows, sql, reader_gone, bounds)

    monkeypatch.setattr("flows.queries.conditions.true_rows", spied)
    frames = {"rollouts": ROWS.lazy().with_columns(trace_id=pl.format("t{}", "step"))}
    assert matching_traces(frames, "step > 2", OF_MACHINE) == (["t3", "t4"], 4)
    assert found(Condition("step > 2")) == [3, 4]
    assert limits == [OF_MACHINE, LIMITS]
    assert OF_MACHINE.memory == psutil.virtual_memory().total


def test_a_condition_ends_with_its_reader():
    gone = Event()
    gone.set()
    with pytest.raises(BadCondition, match="its reader went away"):
        matching_rows(ROWS, Condition("(select count(*) from range(100000000000)) > 0"), gone)
    assert psutil.Process().children() == []


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        ("reply ~ 'a+' and prompt ~* 'B'", [("reply", "a+"), ("prompt", "(?i)B")]),
        ("100%", [("reply", "(?i)100%"), ("note", "(?i)100%")]),
        ("reply ~ 'it''s' or reward > 1", [("reply", "it's")]),
        ("reply !~ 'a' or reply like '%a%' or environment ~ 'x'", []),
    ],
)
def test_regular_expressions_of_texts_are_highlighted(text, patterns):
    assert list(search_condition(text).patterns) == patterns

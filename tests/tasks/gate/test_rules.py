"""Rules in SQL: what holds, what does not, what is no rule."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import ConfigError
from tasks.gate.stage import RuleFailed, described, holds, require_rule
from tasks.metrics.figures import MEANINGS

UNKNOWN: dict[str, Any] = dict.fromkeys(MEANINGS)


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
def test_a_rule_holds_where_it_is_true(rule: str, expected: bool) -> None:
    require_rule(rule)
    figures = UNKNOWN | {"trainable_ratio": 0.25, "num_rows": 3, "num_kept": 2, "num_traces": 4}
    assert holds(rule, figures) is expected


comparisons = st.tuples(
    st.sampled_from(sorted(MEANINGS)), st.sampled_from(["<", "<=", "=", "<>", ">=", ">"]), st.integers(-2, 2)
)
SIGNS: dict[str, Any] = {
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
def test_nothing_unknown_is_taken_for_true(known: dict[str, int | None], parts: list[tuple[str, str, int]]) -> None:
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
    ],
)
def test_what_is_no_condition_over_the_figures_is_refused_with_their_names(rule: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="over: num_traces, num_groups, reward_mean") as caught:
        require_rule(rule)
    assert problem in str(caught.value) and "nothing was started" in str(caught.value)


def test_a_rule_that_fails_on_the_figures_at_hand_says_which() -> None:
    rule = "cast(num_rows as tinyint) > 1"
    require_rule(rule)
    with pytest.raises(RuleFailed, match=r"num_rows 1000: .*out of range") as caught:
        holds(rule, UNKNOWN | {"num_rows": 1000})
    assert "Nothing was trained" in str(caught.value)


def test_a_message_names_the_figures_of_the_rule() -> None:
    figures = UNKNOWN | {"fill": 0.123456789, "num_rows": 3}
    assert described("fill > 0.5 or reward_mean > 1", figures) == "reward_mean null, fill 0.123457"

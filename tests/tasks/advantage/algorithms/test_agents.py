"""Agents: environments whose seats an algorithm cannot credit are refused, by what their traces show."""

import pytest

from tasks.advantage.algorithms.credit import AdvantageBreach
from tests.fixtures.builders import failed, trace, verdict
from tests.fixtures.stages import credited, group

TWO = [trace("a", agent="first"), trace("b", agent="second", reward=0.0)]
CUSTOM = {"type": "custom", "function": "nowhere:credit"}


@pytest.mark.parametrize("section", [{"type": "grpo"}, {"type": "rloo"}, {"type": "echo"}, CUSTOM], ids=str)
@pytest.mark.parametrize("step", [0, 3])
def test_several_agents_are_refused_by_what_keeps_none_apart(section, step):
    with pytest.raises(AdvantageBreach, match=r"environment 'reverse' holds trainable agents 'first' and 'second'"):
        credited(TWO, step=step, **section)


def test_a_seat_whose_traces_are_all_filtered_still_counts():
    verdicts = [verdict("a"), verdict("b", reason="truncated")]
    with pytest.raises(AdvantageBreach, match="'first' and 'second'"):
        credited(TWO, verdicts=verdicts, type="grpo")


def test_a_frozen_seat_and_a_rollout_that_failed_before_it_began_do_not_count():
    frozen = trace("b", agent="second", trainable=False)
    lost = failed("c", agent="agent", num_turns=0)
    verdicts = [verdict("a"), verdict("b", reason="untrainable"), verdict("c", reason="errored")]
    rows = credited([TWO[0], frozen, lost], verdicts=verdicts, step=0, type="grpo")
    assert [row["trace_id"] for row in rows] == ["a"]


def test_another_seat_in_another_group_is_compared_with_nobody():
    rows = credited([*group(1.0, 0.0, agent="first"), *group(1.0, 0.0, group_id="g1", agent="second")], type="grpo")
    assert [row["advantage"] for row in rows] == [0.5, -0.5, 0.5, -0.5]


@pytest.mark.parametrize("kind", ["rae", "hierarchical_grpo"])
def test_a_single_agent_is_refused_by_what_has_a_baseline_for_each(kind):
    with pytest.raises(AdvantageBreach, match=f"environment 'reverse' has one trainable agent, 'agent', and {kind!r}"):
        credited(group(1.0, 0.0), type=kind, step=0)


def test_later_a_seat_may_be_missing():
    assert credited(group(1.0, 0.0, agent="solver"), type="hierarchical_grpo", step=3)


def test_environments_of_both_kinds_are_refused_in_one_run():
    own = {"duel": {"type": "hierarchical_grpo"}, "reverse": {"type": "grpo"}}
    duel = [
        trace(f"d{i}", environment="duel", group_id="d", agent=agent) for i, agent in enumerate(("solver", "other"))
    ]
    with pytest.raises(AdvantageBreach, match="environment 'duel' has 2 trainable agents and 'reverse' has one: a run"):
        credited([*duel, *group(1.0, 0.0)], environments=own, step=0)
    assert len(credited([*duel, *group(1.0, 0.0)], environments=own, step=1)) == 4

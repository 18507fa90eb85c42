"""Custom: a function of one's own is called, and what it returns is held to what training needs; so are all others."""

from dataclasses import replace

import numpy as np
import pytest

from tasks.advantage.algorithms import ALGORITHMS
from tasks.advantage.algorithms.credit import AdvantageBreach, GroupedTraces
from tasks.advantage.algorithms.custom import require_credit
from tasks.advantage.stage import STAGE, StateMissing
from tasks.arrays.ragged import Ragged
from tasks.runtime.imports import NotImportable, code_version
from tests.fixtures.builders import table, trace, view
from tests.fixtures.stages import advantage, advantages, credited, group, tables_of

HERE = "tests.fixtures.masks"


def by(name, *rewards, **section):
    """The credits that a function of tests/fixtures/masks.py gives a group with these rewards, else 1 and 0."""
    return credited(group(*(rewards or (1.0, 0.0))), type="custom", function=f"{HERE}:{name}", **section)


def test_it_credits_with_its_arguments():
    rows = by("halved")
    assert advantages(rows) == [0.25, -0.25] and rows[0]["rl_weights"] == [0, 0, 0, 1, 1]
    assert advantages(by("halved", arguments={"factor": 3})) == [1.5, -1.5]


def test_what_it_does_to_its_arguments_is_its_own_affair():
    section = {"type": "custom", "function": f"{HERE}:careless", "arguments": {"factor": 3}}
    config, tables = view(STAGE, algorithm=section), tables_of(group(1.0, 0.0))
    first, again = (advantage(tables, config, step=1)["samples"].to_pylist() for _ in range(2))
    assert first == again, "what one step does to the arguments is not known to the next"
    assert advantages(first) == [1.5, -1.5] and [row["rl_weights"] for row in first] == [[0, 0, 0, 1, 1]] * 2


def test_it_is_given_references_of_its_own():
    rows, tables = Ragged(np.array([-0.5, -1.0]), np.array([0, 2])), tables_of([trace("t0")])
    kept = GroupedTraces(tables["traces"], tables["messages"], np.zeros(1, np.int64), rows, rows)
    own = kept.copy().references
    assert own.values.tolist() == [-0.5, -1.0] and not np.shares_memory(own.values, rows.values)


def test_it_is_judged_by_what_was_sampled_and_not_by_what_it_made_of_that():
    with pytest.raises(AdvantageBreach, match="rl has weight on tokens that the policy did not sample"):
        by("greedy")


def test_other_code_than_the_config_was_resolved_with_is_refused():
    assert advantages(by("halved", version=code_version(f"{HERE}:halved"))) == [0.25, -0.25]
    with pytest.raises(NotImportable, match=r"was resolved with sha256:other\. Nothing was computed; all .* is safe"):
        by("halved", version="sha256:other")


def test_a_trace_without_a_reward_may_go_without_an_advantage():
    assert advantages(by("halved", 1.0, 0.0, None)) == [0.25, -0.25, None]


@pytest.mark.parametrize("component", ["rl", "ref_kl"])
def test_a_signal_of_its_own_stands_for_advantages(component):
    rows = by("signalled", arguments={"component": component})
    assert rows[0]["advantages"] == [0, 0, 0, 0.25, 0.25] and rows[0][f"{component}_weights"] == [0, 0, 0, 1, 1]
    assert advantages(rows) == [None, None]


def test_state_that_it_keeps_is_what_it_finds_at_the_next_step():
    own = view(STAGE, algorithm={"type": "custom", "function": f"{HERE}:remembering", "keeps_state": True})
    tables, states = tables_of(group(1.0, 0.0)), {}
    found = []
    for step in range(2):
        made = advantage(tables | states, own, step=step)
        found.append(made["samples"]["advantage"].to_pylist())
        states = {"estimator_states": made["estimator_states"]}
    # b: 0 -> 0.5 -> 0.25 -> 0.625 -> 0.3125, taken first.
    assert found == [[0.5, -0.25], [0.375, -0.3125]]
    assert states["estimator_states"].to_pylist()[0]["num_traces"] == 4
    with pytest.raises(StateMissing, match="algorithm custom goes on from the state after step 0"):
        advantage(tables, own, step=1)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("none", "it keeps state and returned NoneType for states, not a table with the schema ESTIMATOR_STATES.arrow"),
        (
            "samples",
            r"it keeps state and returned a table of \[.*'trace_id'.*\] for states, not a table with the schema .*",
        ),
        ("elsewhere", "states are of environment 'elsewhere', whose traces it was not given"),
        ("twice", "states have an example and agent twice"),
        ("nan", "states have values that are not finite"),
    ],
)
def test_state_that_could_not_be_handed_back_is_refused(kind, message):
    with pytest.raises(AdvantageBreach, match=rf": {message}\. Nothing was trained"):
        by("misremembering", step=0, arguments={"kind": kind}, keeps_state=True)


TEACHER = {"teacher": {"path": "/teacher"}}
SECTIONS = {"opd": TEACHER, "sft": TEACHER, "echo": {"user": {"alpha": 0.5}}}
ALONE = [trace("a"), trace("b", reward=0.0), trace("c", reward=None)]
SEATS = [row | {"agent": agent, "group_id": agent} for row, agent in zip(ALONE, ("one", "two", "two"), strict=True)]


def given(traces):
    """What the stage reads: an exchange for each trace, all of it scored by a reference."""
    scored = [{"trace_id": one["trace_id"], "message": 1, "logprobs": [-0.5, -2.0]} for one in traces]
    return tables_of(traces) | {"references": table("references", scored)}


@pytest.mark.parametrize("kind", sorted(set(ALGORITHMS) - {"custom"}))
def test_its_credit_is_one_that_training_can_be_held_to(kind, monkeypatch):
    algorithm, seen = ALGORITHMS[kind], []

    def watched(kept, settings):
        seen.append((kept, algorithm.credit(kept, settings)))
        return seen[-1][1]

    monkeypatch.setitem(ALGORITHMS, kind, replace(algorithm, credit=watched))
    config = view(STAGE, algorithm={"type": kind} | SECTIONS.get(kind, {}))
    advantage(given(SEATS if kind in ("rae", "hierarchical_grpo") else ALONE), config)
    ((kept, credit),) = seen
    require_credit(kept, replace(credit, states=None))
    assert credit.signals(kept).dtype == np.float32

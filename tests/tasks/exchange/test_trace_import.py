"""Steps, groups and members of episodes that know little of these, and ids of traces that no other rollout has."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.schemas.stage_tables import BATCHES, SAMPLES
from tasks.exchange.episodes import Episode
from tasks.exchange.trace_import import ID_LENGTH, arrange, split_repeated, with_unique_ids
from tasks.exchange.traces import source_of
from tasks.metrics.accounting import account
from tests.fixtures.builders import table, trace, verdict
from tests.tasks.exchange.lines import ORIGIN, read, verifiers_lines


def episode(name, example="e", **values):
    """Return an episode of one trace."""
    row = trace(name)
    for column in ("assignment_id", "group_id", "environment", "example_id", "episode_id"):
        del row[column]
    given = {"group": None, "step": None, "task": f"task of {example}"} | values
    return Episode(ORIGIN, name, "reverse", example, traces=[row], messages=[], **given)


EPISODES = st.lists(
    st.builds(
        dict,
        example=st.sampled_from(["a", "b", "c"]),
        group=st.none() | st.sampled_from(["g", "h"]),
        step=st.none() | st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=20)
@given(EPISODES)
def test_every_episode_is_one_member_of_one_group(drawn):
    found = arrange([episode(f"t{number}", **values) for number, values in enumerate(drawn)])
    seen = Counter(row["trace_id"] for step in found.steps for row in found.rows(step)[0].to_pylist())
    assert seen == Counter(f"t{number}" for number in range(len(drawn)))
    examples_of = {}
    for step in found.steps:
        traces, assigned = found.rows(step)[0], found.assignments(step)
        verdicts = table("verdicts", [verdict(name, reason="x") for name in traces["trace_id"].to_pylist()])
        empty = SAMPLES.arrow.empty_table(), BATCHES.arrow.empty_table()
        account(assigned, traces, verdicts, *empty)  # raises unless all answer each other
        for row in assigned.to_pylist():
            examples_of.setdefault(row["group_id"], set()).add(row["example_id"])
    assert all(len(examples) == 1 for examples in examples_of.values()), "a group compares attempts at one example"


def test_groups_and_steps_of_the_file_stand():
    found = arrange(
        [episode("t0", step=5), episode("t1", step=2, group="g"), episode("t2", step=2), episode("t3", step=2)]
    )
    assert list(found.steps) == [2, 5]
    assert found.assignments(2)["assignment_id"].to_pylist() == ["2-0/0", "2-1/0", "2-1/1"]
    assert found.rows(5)[0]["policy_version"].to_pylist() == [0], "what a trace says of its policy stands"


def test_another_task_under_a_known_id_is_another_example():
    found = arrange([episode("t0"), episode("t1", task="other"), episode("t2", task="other")])
    assert found.examples()["example_id"].to_pylist() == ["e", "e#2"]
    assert found.rows(0)[0]["example_id"].to_pylist() == ["e", "e#2", "e#2"]


def test_a_trace_that_is_there_twice_is_a_problem(tmp_path):
    line = verifiers_lines("tokens")[0]
    episodes, _ = read(tmp_path / "t.jsonl", [line, line])
    kept, problems = split_repeated(episodes)
    assert len(kept) == 1
    assert [(problem.line, problem.reason) for problem in problems] == [(2, "a trace is there twice")]


NODES = [
    {"message": {"role": "user", "content": "q"}, "token_ids": [1], "mask": [False]},
    {
        "message": {"role": "assistant", "content": "a"},
        "sampled": True,
        "parent": 0,
        "token_ids": [2],
        "mask": [True],
        "logprobs": [-0.5],
    },
]


def good(path, *lines):
    """Return the episodes of a file of these lines, all of them good."""
    found, problems = read(path, lines)
    assert len(found) == len(lines) and not problems
    return found


@pytest.mark.parametrize("given", ["0", "run/7", "deadbeef"])
def test_an_id_of_a_file_is_told_apart_from_the_same_of_another_rollout(given, tmp_path):
    line = {"id": given, "task": {"data": {"x": 1}}, "nodes": NODES, "rewards": {}}
    (one,) = with_unique_ids(good(tmp_path / "a.jsonl", line))
    (other,) = with_unique_ids(good(tmp_path / "b.jsonl", line | {"task": {"data": {"x": 2}}}))
    (again,) = with_unique_ids(good(tmp_path / "c.jsonl", dict(reversed(line.items()))))
    name = one.traces[0]["trace_id"]
    assert name.endswith(f"-{given}") and len(name) == ID_LENGTH + 1 + len(given)
    assert other.traces[0]["trace_id"] not in (name, given)
    assert again.traces[0]["trace_id"] == name, "the same rollout has the same id"
    assert {row["trace_id"] for row in one.messages} == {one.episode_id} == {name}
    assert source_of(one.traces[0], one.messages) == line


def test_ids_by_chance_stand(tmp_path):
    spelt = {"id": "c7f9e2a0-52b4-4a07-9b3e-11d6f7f0a1b2", "nodes": NODES, "task": {}}
    found = good(tmp_path / "t.jsonl", *verifiers_lines("tokens"), spelt)
    assert with_unique_ids(found) == found

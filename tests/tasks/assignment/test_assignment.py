"""Assignment: a pure function of examples, seed and step, whose epochs miss and repeat nothing."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.schemas.contract import RowPlace, check_rows
from storage.schemas.stage_tables import ASSIGNMENTS, DIFFICULTIES
from tasks.assignment.examples import FieldMissing
from tasks.assignment.stage import EVALUATION_STAGE, STAGE, BatchRequest, TooFewExamples
from tests.fixtures.builders import environments, example, table, trace, view
from tests.fixtures.stages import assignment, evaluation_assignment

ALONE, BOTH = environments(reverse={}), environments(reverse={}, sums={})


def examples(**counts):
    rows = [example(f"{name}{i}", name) for name, count in counts.items() for i in range(count)]
    return {"examples": table("examples", rows + [example("held-out", name, "eval") for name in counts])}


def assigned(tables, step=0, batch=0, seed=7, own=ALONE, **settings):
    config = view(STAGE, seed=seed, environments=own, assignment=settings)
    return assignment(tables, config, BatchRequest(batch), step)["assignments"]


def groups(rows):
    """The example of every group, in order."""
    return [row["example_id"] for row in rows.to_pylist() if row["member"] == 0]


def test_rows_satisfy_the_contract():
    rows = assigned(examples(reverse=5), groups_per_step=3, group_size=2)
    check_rows(rows, ASSIGNMENTS, RowPlace("assignments"))
    assert rows["assignment_id"].to_pylist() == ["0-0/0", "0-0/1", "0-1/0", "0-1/1", "0-2/0", "0-2/1"]
    assert rows["member"].to_pylist() == [0, 1] * 3


def test_seeds_differ_and_fit_63_bits():
    seeds = [s for step in range(4) for s in assigned(examples(reverse=5), step, group_size=16)["seed"].to_pylist()]
    assert len(set(seeds)) == 4 * 8 * 16
    assert all(0 <= seed < 2**63 for seed in seeds) and max(seeds) > 2**62


def test_held_out_examples_are_never_assigned():
    assert "held-out" not in groups(assigned(examples(reverse=3), groups_per_step=50))


@settings(max_examples=30)
@given(count=st.integers(1, 12), per_step=st.integers(1, 30), num_steps=st.integers(1, 6), seed=st.integers(0, 99))
def test_each_epoch_has_every_example_once_however_steps_cut_it(count, per_step, num_steps, seed):
    tables = examples(reverse=count)
    steps = [assigned(tables, step, seed=seed, groups_per_step=per_step, group_size=1) for step in range(num_steps)]
    walked = [example for rows in steps for example in groups(rows)]
    for start in range(0, len(walked), count):
        epoch = walked[start : start + count]
        assert len(set(epoch)) == len(epoch)
    names = [group for rows in steps for group in rows["group_id"].to_pylist()]
    assert len(set(names)) == len(names)


def test_without_shuffle_examples_come_in_their_own_order():
    rows = assigned(examples(reverse=3), step=1, groups_per_step=4, shuffle=False)
    assert groups(rows) == ["reverse1", "reverse2", "reverse0", "reverse1"]


def test_one_environment_does_not_move_the_walk_of_another():
    tables = examples(reverse=50, sums=50)
    both = [assigned(tables, s, own=BOTH, groups_per_step=8) for s in range(2)]
    alone = assigned(tables, 0, groups_per_step=8)
    assert [e for rows in both for e in groups(rows) if e.startswith("reverse")] == groups(alone)


def test_an_environment_without_train_examples_says_what_to_do():
    with pytest.raises(TooFewExamples, match=r"'sums' has 0 examples of split 'train' \(of 1 in all\).*holdout"):
        assigned(examples(reverse=3, sums=0), own=BOTH)


def test_no_environment_is_an_error():
    with pytest.raises(TooFewExamples, match="names no environment"):
        assignment(examples(reverse=3), view(STAGE), step=0)


def evaluated(tables, seed=7, **settings):
    config = view(EVALUATION_STAGE, seed=seed, environments=ALONE, evaluation=settings)
    return evaluation_assignment(tables, config)["assignments"]


def held_out(count):
    rows = [example(f"e{i}", split="eval") for i in range(count)] + [example("train")]
    return {"examples": table("examples", rows)}


def test_evaluation_takes_the_first_in_hash_order_whatever_the_seed():
    rows = evaluated(held_out(10), num_examples=4, attempts=3)
    check_rows(rows, ASSIGNMENTS, RowPlace("assignments"))
    assert groups(rows) == ["e7", "e9", "e2", "e8"]
    assert rows.num_rows == 12 and rows["assignment_id"][0].as_py() == "eval-reverse-0/0"
    other = evaluated(held_out(10), seed=8, num_examples=4, attempts=3)
    assert groups(other) == groups(rows) and not set(other["seed"].to_pylist()) & set(rows["seed"].to_pylist())


def test_more_held_out_examples_keep_the_order_of_those_there():
    few, many = groups(evaluated(held_out(10), num_examples=10)), groups(evaluated(held_out(30), num_examples=30))
    assert [example for example in many if example in few] == few


def test_too_few_held_out_examples_is_an_error():
    with pytest.raises(TooFewExamples, match=r"has 3 examples of split 'eval' \(of 4 in all\), but 4 are wanted"):
        evaluated(held_out(3), num_examples=4)


def test_a_further_batch_has_only_the_groups_that_are_missing_and_other_examples():
    tables = examples(reverse=6, sums=6)
    config = view(STAGE, environments=BOTH, assignment={"groups_per_step": 6, "group_size": 2})
    first = assignment(tables, config, step=1)["assignments"]
    again = tables | {"assignments": first}
    second = assignment(again, config, BatchRequest(1, {"sums": 2, "reverse": 1}), 1)["assignments"]
    rows = [row for row in second.to_pylist() if row["member"] == 0]
    assert [(row["group_id"], row["environment"]) for row in rows] == [
        *[("1.1-0", "reverse"), ("1.1-1", "sums"), ("1.1-2", "sums")]
    ]
    assert not set(groups(second)) & set(groups(first)) and len(set(groups(second))) == 3
    assert not set(second["seed"].to_pylist()) & set(first["seed"].to_pylist())
    third = assignment(again, config, BatchRequest(2, {"sums": 2}), 1)["assignments"]
    assert set(groups(third)) != set(groups(second)), "another batch has an order of its own"


def test_difficulties_are_made_where_traces_came_in_and_handed_on_within_a_step():
    config = view(
        STAGE,
        environments=ALONE,
        assignment={"groups_per_step": 2, "sampler": {"type": "difficulty_pools"}},
    )
    tables = examples(reverse=6)
    begun = assignment(tables, config, step=0)
    assert begun["difficulties"].num_rows == 0
    traces = table("traces", [trace("t", example_id="reverse3", reward=0.5)])
    later = assignment(tables | {"difficulties": begun["difficulties"], "traces": traces}, config, step=1)
    check_rows(later["difficulties"], DIFFICULTIES, RowPlace("difficulties"))
    assert [row["example_id"] for row in later["difficulties"].to_pylist()] == ["reverse3"]
    within = tables | {"difficulties": later["difficulties"], "assignments": later["assignments"]}
    refill = assignment(within, config, BatchRequest(1, {"reverse": 1}), 1)
    assert set(refill) == {"assignments"}, "the step's first assignment has said what is known"


def test_the_standard_sampler_keeps_nothing():
    tables = examples(reverse=6) | {"traces": table("traces", [trace("t")])}
    assert set(assignment(tables, view(STAGE, environments=ALONE), step=1)) == {"assignments"}


def tiered(count):
    """Held-out examples of tiers 0 to 3 in turn."""
    rows = [
        example(f"e{i}", split="eval") | {"task": json.dumps({"info": {"tier": i % 4}, "known": True})}
        for i in range(count)
    ]
    return {"examples": table("examples", [*rows, example("train")])}


def test_a_filter_chooses_by_fields_of_the_task_in_the_same_order():
    everyone = groups(evaluated(tiered(40), num_examples=40))
    hard = groups(evaluated(tiered(40), num_examples=20, where={"info.tier": [2, 3]}))
    assert hard == [name for name in everyone if int(name[1:]) % 4 >= 2]
    assert groups(evaluated(tiered(40), num_examples=10, where={"info.tier": [3], "known": [True]})) == [
        name for name in everyone if int(name[1:]) % 4 == 3
    ]


def test_a_filter_by_a_field_that_examples_lack_is_an_error_and_tries_nothing():
    with pytest.raises(FieldMissing, match=r"40 of 40 examples have no field 'tier', first e0.*fields info, known"):
        evaluated(tiered(40), num_examples=4, where={"tier": [3]})


def test_true_is_not_one():
    with pytest.raises(TooFewExamples, match="has 0 examples of split 'eval'"):
        evaluated(tiered(8), num_examples=1, where={"known": [1]})


def test_an_evaluation_may_name_its_environments():
    tables = {"examples": table("examples", [example(name, name, "eval") for name in ("reverse", "sums")])}
    config = view(
        EVALUATION_STAGE,
        environments=BOTH,
        evaluation={"num_examples": 1, "environments": ["sums"]},
    )
    assert groups(evaluation_assignment(tables, config)["assignments"]) == ["sums"]


def test_what_ended_with_an_error_is_assigned_again_with_another_seed():
    first = evaluated(held_out(6), num_examples=3, attempts=2)
    names = first["assignment_id"].to_pylist()
    rows = [trace(name, assignment_id=name, error_class="timeout" if name in names[1:3] else None) for name in names]
    tables = held_out(6) | {"assignments": first, "traces": table("traces", rows)}
    again = evaluated(tables, num_examples=3, attempts=2)
    check_rows(again, ASSIGNMENTS, RowPlace("assignments"))
    assert again["assignment_id"].to_pylist() == names[1:3]
    assert again.drop_columns("seed").equals(first.slice(1, 2).drop_columns("seed"))
    third = evaluated(tables | {"assignments": again}, num_examples=3, attempts=2)
    seeds = [set(each["seed"].to_pylist()) for each in (first, again, third)]
    assert len(set.union(*seeds)) == 6 + 2 + 2

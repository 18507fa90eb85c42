"""Oversampling and refilling: how many groups are begun, which are enough, and how many are missing."""

from collections import Counter
from fractions import Fraction

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from storage.schemas.stage_tables import SAMPLES
from tasks.arrays.group_counts import admitted_groups, groups_to_refill, num_begun, num_needed, oversampled_turn
from tasks.assignment.stage import STAGE, BatchRequest
from tests.fixtures.builders import environments, example, table, view
from tests.fixtures.stages import assignment

STREAMS = ("rl_weights", "ce_weights", "ref_kl_weights")


def assignments(*groups):
    """Two members of each group; a group is named after its environment and a number."""
    rows = [{"group_id": group, "environment": group[0]} for group in groups for _ in range(2)]
    return pa.Table.from_pylist(rows, schema=pa.schema([("group_id", pa.string()), ("environment", pa.string())]))


def credits(*samples):
    """Samples as group and weights in the rl component, or in the one named."""
    rows = []
    for group, weights, *stream in samples:
        row = dict.fromkeys(STREAMS, [0.0] * len(weights)) | {stream[0] if stream else "rl_weights": weights}
        rows.append({"group_id": group, **row})
    return pa.Table.from_pylist(rows, schema=pa.schema([SAMPLES.arrow.field(name) for name in ("group_id", *STREAMS)]))


FACTORS = st.integers(100, 400).map(lambda percent: percent / 100)


@given(needed=st.integers(0, 500), factor=FACTORS)
def test_what_was_needed_is_enough_of_what_was_begun(needed, factor):
    assert num_begun(needed, factor) >= needed * Fraction(repr(factor)) > num_begun(needed, factor) - 1
    assert num_needed(num_begun(needed, factor), factor) == needed


@given(turn=st.integers(0, 500), needed=st.integers(1, 50), factor=FACTORS)
def test_the_next_step_goes_on_where_this_one_ends_or_one_before(turn, needed, factor):
    end = oversampled_turn(turn, factor) + num_begun(needed, factor)
    assert oversampled_turn(turn + needed, factor) in (end - 1, end)


def walked(step=0, batch=0, groups=None, weights=None, **settings):
    weights = weights or {"reverse": 1.0}
    rows = [example(f"{name}{i:02}", name) for name in weights for i in range(30)]
    own = environments(**{name: {"weight": weight} for name, weight in weights.items()})
    config = view(STAGE, seed=7, environments=own, assignment={"group_size": 1, "shuffle": False} | settings)
    made = assignment({"examples": table("examples", rows)}, config, BatchRequest(batch, groups), step)
    return [(row["group_id"], row["example_id"]) for row in made["assignments"].to_pylist()]


def test_an_environment_begins_more_groups_and_walks_faster():
    first = walked(0, groups_per_step=3, oversampling=1.5)
    assert first == [("0-0", "reverse00"), *((f"0-{i}", f"reverse{i:02}") for i in range(1, 5))]
    # 1.5 x 3 = 4.5: the second step begins in the middle of the fifth example, which is tried again.
    assert [name for _, name in walked(1, groups_per_step=3, oversampling=1.5)] == [
        f"reverse{i:02}" for i in range(4, 9)
    ]
    assert walked(2, groups_per_step=3, oversampling=1.5)[0] == ("2-0", "reverse09")


def test_each_environment_has_its_own_more():
    names = [name for _, name in walked(groups_per_step=6, oversampling=1.5, weights={"a": 2.0, "b": 1.0})]
    assert Counter(name[0] for name in names) == {"a": 6, "b": 3}
    assert len(set(names)) == 9
    assert Counter(name[0] for name in names[:6]) == {"a": 4, "b": 2}, "what is needed comes first"


def test_replacements_are_oversampled_as_well():
    rows = walked(batch=1, groups={"a": 2}, groups_per_step=6, oversampling=2.0, weights={"a": 2.0, "b": 1.0})
    assert [group for group, _ in rows] == ["0.1-0", "0.1-1", "0.1-2", "0.1-3"]
    assert {name[0] for _, name in rows} == {"a"}


def test_groups_beyond_the_needed_ones_need_no_replacement():
    first = assignments("a0", "a1", "a2", "b0", "b1", "b2")
    held = credits(("a0", [0.0, 1.0]), ("a1", [0.0, 1.0]), ("b2", [0.0, 1.0]))
    assert groups_to_refill(first, first, held, 1.5) == {"b": 1}
    assert groups_to_refill(first, first, held) == {"a": 1, "b": 2}


def test_a_group_is_admitted_with_a_weight_that_training_uses():
    found = credits(
        ("a0", [0.0, 0.0, 1.0]),
        ("a1", [0.0, 0.0]),
        ("a2", [1.0, 0.0]),  # the first token is predicted from nothing
        ("a3", [0.0, 0.5], "ce_weights"),
        ("a4", [0.0, -1.0], "ref_kl_weights"),
        ("a5", []),
        ("a1", [0.0]),
    )
    assert admitted_groups(found) == {"a0", "a3", "a4"}


@given(
    groups=st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), min_size=1, max_size=8), wanted=st.integers(1, 8)
)
def test_it_is_what_a_loop_says(groups, wanted):
    names = [f"{environment}{number}" for number, (environment, _) in enumerate(groups)]
    first = assignments(*names[:wanted])
    held = credits(*[(name, [0.0, float(good)]) for name, (_, good) in zip(names, groups, strict=True)])
    expected = {}
    for environment in "ab":
        asked_for = sum(name[0] == environment for name in names[:wanted])
        got = sum(good for of, good in groups if of == environment)
        if asked_for > got:
            expected[environment] = asked_for - got
    assert groups_to_refill(first, assignments(*names), held) == expected

"""Refilling: how many groups are missing, by hand and against a loop over samples."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tasks.arrays.group_counts import admitted_groups, groups_to_refill
from tests.tasks.assignment.groups import assignments, credits


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


def test_what_is_missing_is_missing_by_environment():
    first = assignments("a0", "a1", "b0", "b1", "b2")
    held = credits(("a0", [0.0, 1.0]), ("b2", [0.0, 1.0]))
    assert groups_to_refill(first, first, held) == {"a": 1, "b": 2}
    later = pa.concat_tables([first, assignments("a.1-0", "b.1-0", "b.1-1")])
    more = pa.concat_tables([held, credits(("b.1-1", [0.0, 1.0]), ("a.1-0", [0.0, 1.0]))])
    assert groups_to_refill(first, later, more) == {"b": 1}
    assert groups_to_refill(first, later, pa.concat_tables([more, credits(("b0", [0.0, 1.0]))])) == {}


def test_all_is_missing_where_nothing_was_credited():
    first = assignments("a0", "a1", "b0")
    assert groups_to_refill(first, first, credits()) == {"a": 2, "b": 1}


@given(
    groups=st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), min_size=1, max_size=8),
    wanted=st.integers(1, 8),
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

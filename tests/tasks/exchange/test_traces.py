"""Patches: whatever two JSON values are, the one is made of the other."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasks.exchange.traces import apply_patch, difference, shortest

SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False, width=32) | st.text(max_size=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=12,
)


def exactly(value):
    """Spell a value so that 1, 1.0 and true differ."""
    return json.dumps(value, sort_keys=True)


@given(VALUES, VALUES)
def test_a_patch_makes_the_one_of_the_other(old, new):
    before = exactly(old)
    patch = difference(old, new)
    assert exactly(apply_patch(old, patch)) == exactly(new)
    assert exactly(old) == before
    assert json.loads(json.dumps(patch)) == patch, "a patch is JSON itself"


@given(VALUES)
def test_equal_values_have_no_patch(value):
    assert difference(value, json.loads(json.dumps(value))) is None


def test_a_patch_holds_what_differs_and_no_more():
    old = {"same": [1, 2], "gone": None, "inside": {"a": 1, "b": 2}}
    new = {"same": [1, 2], "inside": {"a": 1, "b": 3}, "come": 4}
    inside = {"inside": {"inside": {"b": {"set": 3}}}, "come": {"set": 4}}
    assert difference(old, new) == {"inside": inside, "remove": ["gone"]}
    assert difference([{"a": 1}, 1], [{"a": 1}, 2]) == {"inside": {"1": {"set": 2}}}
    assert difference([1, 2], [1, 4]) == {"set": [1, 4]}, "a list of plain values is one value"


def test_what_is_no_number_equals_itself():
    assert difference({"x": float("nan")}, {"x": float("nan")}) is None


@given(st.lists(st.floats(-50, 0, allow_nan=False).map(lambda value: round(value, 4)), max_size=20))
def test_four_decimals_survive_single_precision(values):
    assert shortest(np.asarray(values, np.float32)) == values


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=20))
def test_the_shortest_spelling_is_the_same_number(values):
    assert np.asarray(shortest(values), np.float32).tolist() == values

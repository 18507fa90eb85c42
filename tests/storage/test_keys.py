"""Keys: golden values that hold for ever, and what has no key."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import StoreError
from storage.keys import canonical_json, content_key, work_key

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_golden_canonical_spelling():
    value = {"b": [1, 1.0, 1e-7, True, None], "a": {"é": "漢", "": -0.0}, "B": (2, "x")}
    assert canonical_json(value) == ('{"B":[2,"x"],"a":{"":-0.0,"\\u00e9":"\\u6f22"},"b":[1,1.0,1e-07,true,null]}')


def test_golden_keys():
    assert content_key(b"") == "e3b0c44298fc1c149afbf4c8996fb924"
    assert content_key({}) == "44136fa355b3678a1146ad16f7e8649e"
    key = work_key("advantage", 1, 12, {"algorithm": "grpo", "scale": 0.1}, {"filtering": "a" * 32})
    assert key == "bfcebf7023f5164aca857b1014463264"


def test_each_part_of_the_work_changes_its_key():
    base = ("advantage", 1, 12, {"x": 1}, {"filtering": "k"})
    others = [
        ("packing", 1, 12, {"x": 1}, {"filtering": "k"}),
        ("advantage", 2, 12, {"x": 1}, {"filtering": "k"}),
        ("advantage", 1, 13, {"x": 1}, {"filtering": "k"}),
        ("advantage", 1, 12, {"x": 1.0}, {"filtering": "k"}),
        ("advantage", 1, 12, {"x": 1, "y": None}, {"filtering": "k"}),
        ("advantage", 1, 12, {"x": 1}, {"filtering": "l"}),
    ]
    assert len({work_key(*each) for each in (base, *others)}) == 7


@given(VALUES)
def test_spelling_is_json_and_does_not_depend_on_order(value):
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text
    if isinstance(value, dict):
        assert canonical_json(dict(reversed(value.items()))) == text


@pytest.mark.parametrize("value", [math.nan, math.inf, {1: 2}, {"a": {2}}, [b"x"], object()])
def test_what_has_no_single_spelling_has_no_key(value):
    with pytest.raises(StoreError):
        canonical_json(value)

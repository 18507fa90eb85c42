"""Exact quantiles of numbers in a file are those that numpy finds of all of them in memory."""

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasks.arrays.quantiles import Quantiles

AT = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
NUMBERS = st.one_of(
    st.floats(0, 4), st.sampled_from([0.0, 1.0, 5e-324, 1e308, float("inf")]), st.floats(0, allow_infinity=False)
)


@given(parts=st.lists(st.lists(NUMBERS, max_size=40), min_size=1, max_size=5), most=st.sampled_from([8, 64, 1 << 20]))
def test_they_are_numpys(parts, most):
    found = Quantiles(most)
    for part in parts:
        found.add(np.array(part, np.float64))
    values = found.at(AT)
    numbers = np.concatenate([np.array(part, np.float64) for part in parts])
    if not len(numbers):
        assert values is None
        return
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(values, np.quantile(numbers, AT))


def test_numbers_beyond_the_bound_are_not_read_into_memory():
    quantiles = Quantiles(1 << 10)
    quantiles.add(np.arange(1 << 17, dtype=np.float64))
    tracemalloc.start()
    try:
        assert quantiles.at([0.0, 1.0]) == [0, (1 << 17) - 1]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 18, "of a million bytes"


def test_what_is_no_number_makes_all_of_them_none():
    found = Quantiles(8)
    found.add(np.array([1.0, np.nan, 2.0]))
    assert all(np.isnan(each) for each in found.at(AT))

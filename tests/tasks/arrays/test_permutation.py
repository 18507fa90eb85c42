"""The walk through environments and examples: exact shares, true permutations, the same on every machine."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tasks.arrays.permutation import digest, permutation, shares, turns

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def test_the_hash_is_blake2b_of_the_parts_with_separators():
    # printf 'order\x1f7\x1freverse\x1f0\x1f0' | b2sum -l 64
    assert digest("order", 7, "reverse", 0, 0) == 0x230E6D124ACE12D1


def split_mix(seed, number):
    """The number-th output of SplitMix64, in plain integers."""
    z = (seed + number * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_a_permutation_sorts_by_split_mix():
    assert split_mix(1234567, 1) == 6457827717110365317  # the published first output for this seed
    for seed in (0, 7, 2**64 - 1):
        assert permutation(50, seed).tolist() == sorted(range(50), key=lambda i: split_mix(seed, i + 1))


def test_a_hash_keeps_its_parts_apart():
    assert digest("a", "bc") != digest("ab", "c")
    assert digest(1, 23) != digest(12, 3)


def test_shares_read_weights_as_written():
    assert shares([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert shares([3.0]) == [1]
    assert shares([1.0, 2.5]) == [2, 5]


def test_turns_by_hand():
    assert turns([1, 1, 1], 0, 8) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2)]
    assert [turn for turn, _ in turns([3, 1], 0, 8)] == [0, 0, 1, 0, 0, 0, 1, 0]


@given(whole=SHARES, start=st.integers(0, 200), count=st.integers(1, 60))
def test_turns_do_not_depend_on_where_one_starts(whole, start, count):
    assert turns(whole, start, count) == turns(whole, 0, start + count)[start:]


@given(whole=SHARES, periods=st.integers(1, 3))
def test_every_period_is_shared_out_exactly(whole, periods):
    chosen = Counter(turn for turn, _ in turns(whole, 0, periods * sum(whole)))
    assert chosen == {turn: periods * share for turn, share in enumerate(whole)}


@given(whole=SHARES, count=st.integers(1, 60))
def test_nobody_is_a_whole_turn_ahead_of_its_share(whole, count):
    chosen = Counter(turn for turn, _ in turns(whole, 0, count))
    assert all(chosen[turn] < share * count / sum(whole) + 1 for turn, share in enumerate(whole))

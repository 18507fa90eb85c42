"""Which rollouts fail as crashers of their environment server, by hand and against a plain simulation."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.inference.sampling.crash_isolation import (
    MAX_CRASHERS,
    MAX_LONE_LOSSES,
    MIN_LOSSES,
    CrashIsolation,
    InFlightRollout,
)
from tests.fixtures.hosts import assigned


def in_flight(*ids, isolated=False):
    return [InFlightRollout(name, name.partition("/")[0], "e", is_isolated=isolated) for name in ids]


def failed(isolation, *groups, size=2):
    """The messages of assignments that are not sampled any more."""
    rows = assigned("e", [*groups], size).to_pylist()
    failures = {row["assignment_id"]: isolation.failure(row) for row in rows}
    return {name: failure.message for name, failure in failures.items() if failure}


def test_two_losses_isolate_a_rollout_and_two_more_alone_fail_it():
    isolation = CrashIsolation()
    isolation.record(in_flight("a/0", "a/1", "b/0"))
    assert not isolation.isolates("a/1")
    assert not isolation.record(in_flight("a/1", "c/0"))
    assert [isolation.isolates(name) for name in ("a/0", "a/1", "b/0", "c/0")] == [False, True, False, False]
    assert isolation.record(in_flight("a/1", isolated=True))
    assert failed(isolation, "a", "b") == {}, "another step may have crashed it"
    assert isolation.record(in_flight("a/1", isolated=True))
    assert failed(isolation, "a", "b").keys() == {"a/1"}
    assert "'e' died 2 times while this rollout alone was in flight" in failed(isolation, "a")["a/1"]


def test_a_loss_with_nothing_in_flight_or_no_isolation_accuses_nobody():
    isolation = CrashIsolation()
    assert not isolation.record([])
    for _ in range(9):
        assert not isolation.record(in_flight("a/0")), "others may sample there"
    assert isolation.isolates("a/0") and failed(isolation, "a") == {}


def test_a_group_of_which_every_member_kills_costs_a_few_restarts():
    isolation = CrashIsolation()
    for member in range(MAX_CRASHERS):
        assert not any("not tried:" in text for text in failed(isolation, "a", size=8).values())
        for number in range(MIN_LOSSES + MAX_LONE_LOSSES):
            isolation.record(in_flight(f"a/{member}", isolated=number >= MIN_LOSSES))
    untried = failed(isolation, "a", "b", size=8)
    assert untried.keys() == {f"a/{member}" for member in range(8)}
    assert "not tried: 2 other rollouts" in untried["a/7"]


@settings(deadline=None)
@given(killers=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=4), at_once=st.integers(1, 15))
def test_whatever_kills_all_others_have_their_rows(killers, at_once):
    """A plain server: it takes `at_once` rollouts at a time, in order, and dies with the first killer among them."""
    deadly = {f"g{group}/{member}" for group, member in killers}
    rows = {row["assignment_id"]: row for row in assigned("e", [f"g{n}" for n in range(5)], 3).to_pylist()}
    isolation, failures = CrashIsolation(), {}
    for _ in range(200):
        failures |= {name: True for name, row in rows.items() if name not in failures and isolation.failure(row)}
        missing = [name for name in rows if name not in failures]
        free = [name for name in missing if not isolation.isolates(name)]
        wave = free[:at_once] or missing[:1]
        if not wave:
            break
        if deadly.intersection(wave):
            isolation.record(in_flight(*wave, isolated=not free))
        else:
            failures |= dict.fromkeys(wave, False)
    assert len(failures) == len(rows), "it never ends"
    failing = {name for name, has_failed in failures.items() if has_failed}
    groups = [name.partition("/")[0] for name in deadly]
    untried = {name for name in rows if groups.count(name.partition("/")[0]) >= MAX_CRASHERS}
    assert deadly <= failing <= deadly | untried

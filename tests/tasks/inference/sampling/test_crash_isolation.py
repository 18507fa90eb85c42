"""Which rollouts fail as crashers of their environment server, by hand and against a plain simulation."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.inference.sampling.crash_isolation import (
    MAX_CRASHERS,
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


def test_a_loss_with_nothing_in_flight_or_no_isolation_accuses_nobody():
    isolation = CrashIsolation()
    assert not isolation.record([])
    for _ in range(9):
        assert not isolation.record(in_flight("a/0")), "others may sample there"
    assert isolation.isolates("a/0") and failed(isolation, "a") == {}


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

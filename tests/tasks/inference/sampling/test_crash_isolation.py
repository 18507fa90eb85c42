"""Which rollouts fail as crashers of their environment server, by hand and against a plain simulation."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.inference.sampling.crash_isolation import MAX_CRASHERS, MAX_LONE_LOSSES, MIN_LOSSES, CrashIsolation
from tasks.inference.sampling.lost_servers import InFlightRollout
from tests.fixtures.hosts import assigned


def in_flight(*ids: str) -> list[InFlightRollout]:
    return [InFlightRollout(name, name.partition("/")[0], "e") for name in ids]


def failed(isolation: CrashIsolation, *groups: str, size: int = 2) -> dict[str, str]:
    """The messages of assignments that are not sampled any more."""
    rows = assigned("e", [*groups], size).to_pylist()
    failures = {row["assignment_id"]: isolation.failure(row) for row in rows}
    return {name: failure.message for name, failure in failures.items() if failure}


def test_two_losses_isolate_a_group_and_two_more_alone_fail_a_rollout() -> None:
    isolation = CrashIsolation()
    isolation.record(in_flight("a/0", "a/1", "b/0"), is_isolated=False)
    assert not isolation.isolates("a")
    assert not isolation.record(in_flight("a/0", "c/0"), is_isolated=False)
    assert [isolation.isolates(group) for group in "abc"] == [True, False, False]
    assert isolation.record(in_flight("a/1"), is_isolated=True)
    assert failed(isolation, "a", "b") == {}, "another step may have crashed it"
    assert isolation.record(in_flight("a/1"), is_isolated=True)
    assert failed(isolation, "a", "b").keys() == {"a/1"}
    assert "'e' died 2 times while this rollout alone was in flight" in failed(isolation, "a")["a/1"]


def test_a_loss_with_nothing_in_flight_or_no_isolation_accuses_nobody() -> None:
    isolation = CrashIsolation()
    assert not isolation.record([], is_isolated=True)
    for _ in range(9):
        assert not isolation.record(in_flight("a/0"), is_isolated=False), "others may sample there"
    assert isolation.isolates("a") and failed(isolation, "a") == {}


def test_a_group_of_which_every_member_kills_costs_a_few_restarts() -> None:
    isolation = CrashIsolation()
    for number in range(MIN_LOSSES + MAX_CRASHERS * MAX_LONE_LOSSES):
        assert not any("not tried:" in text for text in failed(isolation, "a", size=8).values())
        member = max(number - MIN_LOSSES, 0) // MAX_LONE_LOSSES
        isolation.record(in_flight(f"a/{member}"), is_isolated=number >= MIN_LOSSES)
    untried = failed(isolation, "a", "b", size=8)
    assert untried.keys() == {f"a/{member}" for member in range(8)}
    assert "not tried: 2 other rollouts" in untried["a/7"]


@settings(deadline=None)
@given(killers=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=4), at_once=st.integers(1, 15))
def test_whatever_kills_all_others_have_their_rows(killers: set[tuple[int, int]], at_once: int) -> None:
    """A plain server: it takes `at_once` rollouts at a time, in order, and dies with the first killer among them."""
    deadly = {f"g{group}/{member}" for group, member in killers}
    groups = {f"g{group}": [f"g{group}/{member}" for member in range(3)] for group in range(5)}
    rows: dict[str, Any] = {row["assignment_id"]: row for row in assigned("e", [*groups], 3).to_pylist()}
    isolation, failures = CrashIsolation(), dict[str, bool]()
    for _ in range(100):
        missing = [group for group, names in groups.items() if names[0] not in failures]
        free = [group for group in missing if not isolation.isolates(group)]
        if not missing:
            break
        chosen = free or missing[:1]
        tried = [name for group in chosen for name in groups[group] if not isolation.failure(rows[name])]
        size = at_once if free else 1
        waves = [tried[start : start + size] for start in range(0, len(tried), size)]
        fatal = next((wave for wave in waves if deadly & set(wave)), [])
        ended = {name for wave in waves[: waves.index(fatal) if fatal else None] for name in wave}
        for group in chosen:
            if ended.issuperset(name for name in groups[group] if name in tried):
                failures |= {name: name not in tried for name in groups[group]}
        if fatal:
            isolation.record(in_flight(*fatal), is_isolated=not free)
    assert len(failures) == len(rows), "it never ends"
    found = {name for name, has_failed in failures.items() if has_failed}
    untried = {
        name for names in groups.values() for name in names if sum(member in deadly for member in names) >= MAX_CRASHERS
    }
    assert deadly <= found <= deadly | untried

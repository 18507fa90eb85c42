"""Which rollouts are taken for crashers of their environment server, by hand and against a plain simulation."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.inference.sampling.lost_servers import MAX_TRIED_MEMBERS, Crashers, InFlightRollout
from tests.fixtures.hosts import assigned

SERVER = "environment server 'e'"


def in_flight(*ids: str) -> list[InFlightRollout]:
    return [InFlightRollout(each, each.partition("/")[0], "e") for each in ids]


def chosen(crashers: Crashers, missing) -> tuple[list[str], bool]:
    rows, one_at_a_time = crashers.next_assignments(missing)
    return list(dict.fromkeys(rows["group_id"].to_pylist())), one_at_a_time


def test_two_losses_make_a_suspect_and_one_alone_is_given_up() -> None:
    crashers, missing = Crashers(), assigned("e", ["a", "b", "c"], 2)
    assert chosen(crashers, missing) == (["a", "b", "c"], False)
    assert not crashers.record_loss(SERVER, in_flight("a/0", "a/1", "b/0"))
    assert chosen(crashers, missing) == (["a", "b", "c"], False)
    assert not crashers.record_loss(SERVER, in_flight("a/0", "b/0", "b/1"))
    assert chosen(crashers, missing) == (["c"], False), "the others come first, as many at once as ever"
    left = missing.filter([row["group_id"] != "c" for row in missing.to_pylist()])
    assert chosen(crashers, left) == (["a"], True), "then one group of them, one rollout at a time"
    assert crashers.record_loss(SERVER, in_flight("a/1"))
    failure = crashers.find_given_up(left)["a/1"]
    assert (failure.kind, failure.type) == ("infrastructure", "ServerLost")
    assert "'e' died while this rollout alone was under way" in failure.message
    assert crashers.find_given_up(left).keys() == {"a/1"}


def test_one_alone_at_its_first_loss_is_tried_again() -> None:
    crashers = Crashers()
    assert not crashers.record_loss(SERVER, in_flight("a/0"))
    assert crashers.record_loss(SERVER, in_flight("a/0")), "twice is no accident"


def test_a_loss_with_nothing_under_way_accuses_nobody() -> None:
    crashers = Crashers()
    assert not crashers.record_loss("the engine", [])
    assert chosen(crashers, assigned("e", ["a"], 1)) == (["a"], False)


def test_a_group_of_which_every_member_kills_costs_a_few_restarts() -> None:
    crashers, missing = Crashers(), assigned("e", ["a", "b"], 8)
    for _ in range(2):
        crashers.record_loss(SERVER, in_flight("a/0", "a/1", "b/0"))
    for member in range(MAX_TRIED_MEMBERS):
        assert crashers.record_loss(SERVER, in_flight(f"a/{member}"))
    untried = crashers.find_given_up(missing)
    assert untried.keys() == {f"a/{member}" for member in range(8)}
    assert "not tried: 2 other rollouts" in untried["a/7"].message


@settings(deadline=None)
@given(killers=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=4), at_once=st.integers(1, 15))
def test_whoever_kills_all_others_have_their_rows(killers: set[tuple[int, int]], at_once: int) -> None:
    """A plain server: it takes `at_once` rollouts at a time, in order, and dies with the first killer among them."""
    deadly = {f"g{group}/{member}" for group, member in killers}
    everything = assigned("e", [f"g{number}" for number in range(5)], 3)
    crashers, ended, losses = Crashers(), dict[str, bool](), 0
    while len(ended) < everything.num_rows:
        rows, one_at_a_time = crashers.next_assignments(
            everything.filter([r not in ended for r in everything["assignment_id"].to_pylist()])
        )
        untried, names = crashers.find_given_up(rows), rows["assignment_id"].to_pylist()
        tried = [name for name in names if name not in untried]
        size = 1 if one_at_a_time else at_once
        waves = [tried[start : start + size] for start in range(0, len(tried), size)]
        fatal = next((wave for wave in waves if deadly & set(wave)), None)
        if fatal is None:
            ended |= {name: name in untried for name in names}
            continue
        losses += 1
        assert losses < 100, "it never ends"
        done = {name for wave in waves[: waves.index(fatal)] for name in wave} | untried.keys()
        groups = dict(zip(names, rows["group_id"].to_pylist(), strict=True))
        whole = {group for group in groups.values() if all(n in done for n, g in groups.items() if g == group)}
        ended |= {name: name in untried for name in names if groups[name] in whole}
        crashers.record_loss(SERVER, in_flight(*fatal))
    failed = {name for name, has_failed in ended.items() if has_failed}
    most = {
        name
        for name in ended
        if sum(each.startswith(name.partition("/")[0] + "/") for each in deadly) >= MAX_TRIED_MEMBERS
    }
    assert deadly <= failed <= deadly | most

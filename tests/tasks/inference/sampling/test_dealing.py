"""Rollouts are dealt to the servers of their environment by load, and those of a lost server are played by others."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.inference.sampling import dealing
from tasks.inference.sampling.dealing import GroupSetAside, RolloutDealer
from tasks.inference.sampling.limits import GroupQuota, Limiter
from tasks.inference.sampling.lost_servers import Crashers, ServerGone, ServiceLost, server_name
from tasks.inference.sampling.replicas import Replicas
from tasks.inference.sampling.rollouts import BatchSampler, PreparedGroups, SamplingPlan
from tests.fixtures.hosts import assigned

A, B, C = (f"tcp://127.0.0.1:{port}" for port in (1, 2, 3))


WRONG = "something went wrong there"


def loss(address: str) -> ServiceLost:
    return ServiceLost(server_name("e"), address, "refused", "e")


class Connection:
    """A connection to a server: rollouts are there until they are let go, or the server is given up."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.there: dict[str, asyncio.Future[str]] = {}

    async def play(self, name: str) -> str:
        """Return where the rollout was played in the end."""
        self.there[name] = asyncio.get_running_loop().create_future()
        try:
            return await self.there[name]
        finally:
            del self.there[name]

    def let_go(self, name: str, wrong: bool = False) -> None:
        self.there[name].set_result(WRONG if wrong else self.address)

    def abandon(self) -> None:
        for each in self.there.values():
            each.set_exception(ServerGone())


class Table:
    """A dealer with its servers, and the rollouts that were dealt, in order."""

    def __init__(self, addresses: Sequence[str], **given: Any) -> None:
        self.dealer = RolloutDealer({"e": addresses}, **given)
        self.connections: dict[str, Connection] = {}
        self.dealt: list[tuple[str, str]] = []
        self.tasks: dict[str, asyncio.Task[str]] = {}
        self.dealer._client = self._client  # type: ignore[method-assign, assignment]

    def _client(self, server: tuple[str, str]) -> Connection:
        # Kept where the dealer looks for them when it gives a server up.
        connection: Any = self.connections.setdefault(server[1], Connection(server[1]))
        self.dealer._clients[server] = connection
        return self.connections[server[1]]

    async def begin(self, *names: str) -> None:
        for name in names:
            row = {"assignment_id": name, "group_id": name.partition("/")[0], "environment": "e"}

            async def play(dealt: Any, name: str = name) -> str:
                """Play it; where it goes wrong there, another time elsewhere."""
                for _ in range(9):
                    self.dealt.append((name, dealt.client.address))
                    if (place := await dealt.client.play(name)) != WRONG:
                        return str(place)
                    dealt.move()
                raise AssertionError

            self.tasks[name] = asyncio.create_task(self.dealer.run(row, play))
            await settled()

    async def end(self, *names: str, wrong: bool = False) -> None:
        for name in names:
            self.connections[self.dealer.in_flight[name].server].let_go(name, wrong)
        await settled()

    async def lose(self, address: str) -> bool:
        survived = self.dealer.survive(loss(address))
        if survived:  # the next one of this address is another server
            self.connections.pop(address, None)
        await settled()
        return survived

    def of(self, address: str) -> list[str]:
        return [name for name, each in self.dealt if each == address]


async def settled() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_each_rollout_goes_to_the_server_that_has_fewest() -> None:
    async def run() -> None:
        table = Table([A, B, C])
        await table.begin(*(f"g/{number}" for number in range(9)))
        assert Counter(address for _, address in table.dealt) == {A: 3, B: 3, C: 3}, "members of one group"
        await table.end(*table.of(B))
        await table.begin("h/0", "h/1", "h/2")
        assert table.of(B)[3:] == ["h/0", "h/1", "h/2"], "the others have three each"
        await table.end(*table.dealer.in_flight)
        await table.begin(*(f"i/{number}" for number in range(3)))
        assert [address for _, address in table.dealt[-3:]] == [A, C, B], "of several the one that had fewest so far"
        await table.end(*table.dealer.in_flight)
        assert not table.dealer.in_flight and {*table.dealer._loads.values()} == {0}

    asyncio.run(run())


def test_what_a_lost_server_has_is_played_by_the_others_and_what_ended_is_not() -> None:
    async def run() -> None:
        told = list[ServiceLost]()
        table = Table([A, B, C], record_loss=lambda lost: told.append(lost) or ())
        await table.begin(*(f"g/{number}" for number in range(9)))
        ended, *others = table.of(B)
        await table.end(ended)
        assert await table.lose(B) and await table.lose(B), "who notices it second need not care"
        assert [[each.assignment_id for each in lost.in_flight] for lost in told] == [others]
        assert sorted(table.dealt[9:]) == sorted([(others[0], A), (others[1], C)])
        assert await table.lose(A)
        assert not await table.lose(C), "the last one is the loss of the environment's server"
        assert {each.server for each in table.dealer.in_flight.values()} == {C}
        await table.end(*table.dealer.in_flight)
        assert {name: await task for name, task in table.tasks.items()} == {
            f"g/{number}": B if f"g/{number}" == ended else C for number in range(9)
        }

    asyncio.run(run())


def test_what_went_wrong_on_one_server_is_tried_on_another() -> None:
    async def run() -> None:
        table = Table([A, B])
        await table.begin("g/0", "g/1", "g/2")
        assert table.of(A) == ["g/0", "g/2"]
        await table.end("g/1", wrong=True)
        assert table.dealt[3:] == [("g/1", A)], "also where the other one has more"
        assert table.dealer.in_flight["g/1"].server == A
        assert await table.lose(A), "and what it had is played again by the other"
        await table.end(*table.dealer.in_flight, wrong=True)
        assert Counter(address for _, address in table.dealt[4:]) == {B: 6}, "which is the only one"
        await table.end(*table.dealer.in_flight)
        assert [await each for each in table.tasks.values()] == [B] * 3 and not any(table.dealer._loads.values())

    asyncio.run(run())


def test_a_group_that_was_at_two_losses_is_set_aside() -> None:
    async def run() -> None:
        crashers = Crashers()

        def record_loss(lost: ServiceLost) -> set[str]:
            crashers.record_loss(lost.service, lost.in_flight, alone=False)
            return crashers.find_suspected({each.group_id for each in lost.in_flight})

        table = Table([A, B, C], record_loss=record_loss)
        await table.begin("deadly/0", "b/0", "c/0")
        await table.lose(A)
        assert table.dealt[3:] == [("deadly/0", B)]
        await table.lose(B)
        assert table.dealt[4:] == [("b/0", C)], "b was at one loss"
        with pytest.raises(GroupSetAside):
            await table.tasks["deadly/0"]
        await table.end("b/0", "c/0")

    asyncio.run(run())


def test_where_one_rollout_is_alone_the_loss_of_its_server_is_for_who_looks_for_it() -> None:
    async def run() -> None:
        table = Table([A, B, C], one_at_a_time=True)
        await table.begin("deadly/0")
        assert await table.lose(B), "nothing was there"
        assert not await table.lose(A)
        lost = loss(A)
        assert [each.assignment_id for each in table.dealer.in_flight_at(lost)] == ["deadly/0"]
        table.tasks["deadly/0"].cancel()
        await settled()
        assert len(table.dealer.in_flight_at(lost)) == 1, "it is blamed also after all has been stopped"
        table.dealer.forget({"deadly"})
        assert not table.dealer.in_flight

    asyncio.run(run())


def test_servers_join_and_those_whose_process_has_ended_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealing, "FOLLOW_SECONDS", 0.01)

    async def run() -> None:
        table, lost, asked = Table([A, B]), list[str](), list[Collection[str]]()
        there = [(A, B), (A, B, C), (A, C), (A, C)]

        def find(known: Collection[str]) -> Mapping[str, Sequence[str]]:
            asked.append(known)
            return {"e": there.pop(0) if len(there) > 1 else there[0]}

        def lose(each: ServiceLost) -> None:
            lost.append(each.address)
            assert table.dealer.survive(each)

        following = asyncio.create_task(table.dealer.follow(find, lose))
        while len(asked) < 5:
            await asyncio.sleep(0.01)
        following.cancel()
        assert lost == [B] and table.dealer.addresses == {"e": [A, C]}
        assert asked[0] == {A, B} and asked[-1] == {A, C}
        await table.begin("g/0", "g/1")
        assert [address for _, address in table.dealt] == [A, C]
        await table.end("g/0", "g/1")

    asyncio.run(run())


def test_one_that_is_lost_while_it_is_looked_for_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealing, "FOLLOW_SECONDS", 0.01)

    async def run() -> None:
        table, looks = Table([A, B]), 0
        loop = asyncio.get_running_loop()

        def find(known: Collection[str]) -> Mapping[str, Sequence[str]]:
            nonlocal looks
            looks += 1
            if looks == 1:  # it answered a moment ago
                asyncio.run_coroutine_threadsafe(table.lose(B), loop).result()
            return {"e": (A, B) if looks == 1 else (A,)}

        following = asyncio.create_task(table.dealer.follow(find, lambda lost: None))
        while looks < 3:
            await asyncio.sleep(0.01)
        following.cancel()
        assert table.dealer.addresses == {"e": [A]}

    asyncio.run(run())


STEPS = st.lists(st.tuples(st.sampled_from(["begin", "end", "lose", "join"]), st.integers(0, 9)), max_size=60)


@settings(deadline=None, max_examples=200)
@given(steps=STEPS, seed=st.integers(0, 9))
def test_whatever_happens_each_rollout_ends_once_at_a_server_that_is_there(
    steps: list[tuple[str, int]], seed: int
) -> None:
    async def run() -> None:
        table, begun, free = Table([A, B, C]), 0, dict[str, int]()
        for what, number in [*steps, ("begin", seed)]:
            there = table.dealer.addresses["e"]
            loads = Counter(each.server for each in table.dealer.in_flight.values())
            if what == "begin":
                await table.begin(f"g{number}/{begun}")
                begun += 1
                assert loads[table.dealt[-1][1]] == min(loads[each] for each in there)
            elif what == "end" and table.dealer.in_flight:
                name = sorted(table.dealer.in_flight)[number % len(table.dealer.in_flight)]
                free[name] = free.get(name, 0) + 1
                await table.end(name)
            elif what == "lose":
                address = there[number % len(there)]
                assert await table.lose(address) == (len(there) > 1 or address not in there)
            elif what == "join":
                there += [each for each in (A, B, C) if each not in there][:1]
        assert {each.server for each in table.dealer.in_flight.values()} <= {*table.dealer.addresses["e"]}
        for name in [*table.dealer.in_flight]:
            free[name] = free.get(name, 0) + 1
            await table.end(name)
        assert free == {name: 1 for name in table.tasks} and len(table.tasks) == begun
        assert all(task.done() for task in table.tasks.values()) and not any(table.dealer._loads.values())

    asyncio.run(run())


def test_a_sampler_hands_over_all_groups_but_those_that_are_set_aside() -> None:
    """A deadly rollout takes two of three servers down beside others."""
    handed, crashers = list[str](), Crashers()

    def record_loss(lost: ServiceLost) -> set[str]:
        crashers.record_loss(lost.service, lost.in_flight, alone=False)
        return crashers.find_suspected({each.group_id for each in lost.in_flight})

    class Runner:
        unproven = None

        async def run(self, assignment: dict[str, Any], task: Any, dealt: Any) -> Any:
            table.dealt.append((assignment["assignment_id"], dealt.client.address))
            await dealt.client.play(assignment["assignment_id"])
            return [], []

    sampler = object.__new__(BatchSampler)
    table = Table([A, B, C], record_loss=record_loss)
    parts = {"runner": Runner(), "plan": SamplingPlan(), "quota": GroupQuota({}), "limiter": Limiter(6)}
    parts |= {"begun": set(), "live": {}, "stopped": set(), "replicas": Replicas([], 0, None)}
    parts |= {"on_group": lambda group_id, _: handed.append(group_id), "dealer": table.dealer}
    vars(sampler).update(parts)
    groups = ["deadly", "a", "b", "c", "d"]
    rows = assigned("e", groups, 2).to_pylist()

    async def work() -> None:
        sampler.commit_lock = asyncio.Lock()
        prepare: Callable[[Any], PreparedGroups] = lambda _: PreparedGroups([], {})  # noqa: E731
        prepared = PreparedGroups(rows, {("e", each): "{}" for each in groups})
        sampling = asyncio.create_task(sampler._sample_groups(prepared, prepare))
        await settled()
        while not sampling.done():
            if "deadly/0" in table.dealer.in_flight:
                await table.lose(table.dealer.in_flight["deadly/0"].server)
            else:
                await table.end(*table.dealer.in_flight)
        await sampling

    asyncio.run(work())
    assert sorted(handed) == ["a", "b", "c", "d"] and not sampler.live
    assert Counter(name for name, _ in table.dealt)["deadly/0"] == 2
    assert not table.dealer.in_flight and table.dealer.addresses["e"] == [C]

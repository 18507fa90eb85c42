"""Rollouts go to the servers of their environment by load, and those of a lost server to its peers."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.inference.sampling import server_pool
from tasks.inference.sampling.crash_isolation import CrashIsolation
from tasks.inference.sampling.limits import GroupQuota, Limiter
from tasks.inference.sampling.lost_servers import ServiceLost, server_name
from tasks.inference.sampling.replicas import Replicas
from tasks.inference.sampling.sampler import BatchSampler, PreparedGroups, SamplingPlan
from tasks.inference.sampling.server_pool import GroupIsolated, ServerPool
from tasks.inference.trace_rows.failures import Failure
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


class Table:
    """A pool of servers, and the rollouts that each got, in order."""

    def __init__(self, addresses: Sequence[str], **given: Any) -> None:
        self.pool = ServerPool({"e": addresses}, **given)
        self.connections: dict[str, Connection] = {}
        self.dealt: list[tuple[str, str]] = []
        self.tasks: dict[str, asyncio.Task[str]] = {}
        self.pool._connection = self._connection  # type: ignore[method-assign, assignment]

    def _connection(self, server: tuple[str, str]) -> Connection:
        return self.connections.setdefault(server[1], Connection(server[1]))

    async def begin(self, *names: str) -> None:
        for name in names:
            row = {"assignment_id": name, "group_id": name.partition("/")[0], "environment": "e"}

            async def play(slot: Any, name: str = name) -> str:
                """Play it; where it goes wrong there, another time elsewhere."""
                for _ in range(9):
                    self.dealt.append((name, slot._rollout.server))
                    if (place := await slot.play(name)) != WRONG:
                        return str(place)
                    slot.move()
                raise AssertionError

            self.tasks[name] = asyncio.create_task(self.pool.run(row, play))
            await settled()

    def there(self) -> list[str]:
        """Return the rollouts whose requests have reached their server."""
        in_flight = self.pool.in_flight.items()
        return [name for name, each in in_flight if name in self._connection(("e", each.server)).there]

    async def end(self, *names: str, wrong: bool = False) -> None:
        for name in names:
            self.connections[self.pool.in_flight[name].server].let_go(name, wrong)
        await settled()

    async def lose(self, address: str) -> bool:
        survived = self.pool.reassign(loss(address))
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
        await table.end(*table.pool.in_flight)
        await table.begin(*(f"i/{number}" for number in range(3)))
        assert [address for _, address in table.dealt[-3:]] == [A, C, B], "of several the one that had fewest so far"
        await table.end(*table.pool.in_flight)
        assert not table.pool.in_flight and {*table.pool._loads.values()} == {0}

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
        assert sorted(name for name, _ in table.dealt[9:]) == sorted(others)
        assert sorted(address for _, address in table.dealt[9:]) == [A, C]
        assert await table.lose(A)
        assert not await table.lose(C), "the last one is the loss of the environment's server"
        assert {each.server for each in table.pool.in_flight.values()} == {C}
        await table.end(*table.pool.in_flight)
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
        assert table.pool.in_flight["g/1"].server == A
        assert await table.lose(A), "and what it had is played again by the other"
        await table.end(*table.pool.in_flight, wrong=True)
        assert Counter(address for _, address in table.dealt[4:]) == {B: 6}, "which is the only one"
        await table.end(*table.pool.in_flight)
        assert [await each for each in table.tasks.values()] == [B] * 3 and not any(table.pool._loads.values())

    asyncio.run(run())


def isolating(table: "Table", isolation: CrashIsolation) -> None:
    """Have a table's pool count losses for an isolation."""
    table.pool._record_loss = lambda lost: bool(isolation.record(lost.in_flight, is_isolated=False)) and None
    table.pool._isolates = isolation.isolates


def test_a_group_that_was_at_two_losses_is_isolated() -> None:
    async def run() -> None:
        table = Table([A, B, C])
        isolating(table, CrashIsolation())
        await table.begin("deadly/0", "b/0", "c/0")
        await table.lose(A)
        assert table.dealt[3:] == [("deadly/0", B)]
        await table.lose(B)
        assert table.dealt[4:] == [("b/0", C)], "b was at one loss"
        with pytest.raises(GroupIsolated):
            await table.tasks["deadly/0"]
        await table.end("b/0", "c/0")

    asyncio.run(run())


def test_servers_join_and_those_whose_process_has_ended_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "FOLLOW_SECONDS", 0.01)

    async def run() -> None:
        table, lost, asked = Table([A, B]), list[str](), list[Collection[str]]()
        there = [(A, B), (A, B, C), (A, C), (A, C)]

        def find(known: Collection[str]) -> Mapping[str, Sequence[str]]:
            asked.append(known)
            return {"e": there.pop(0) if len(there) > 1 else there[0]}

        def lose(each: ServiceLost) -> None:
            lost.append(each.address)
            assert table.pool.reassign(each)

        following = asyncio.create_task(table.pool.follow(find, lose))
        while len(asked) < 5:
            await asyncio.sleep(0.01)
        following.cancel()
        assert lost == [B] and table.pool.addresses == {"e": [A, C]}
        assert asked[0] == {A, B} and asked[-1] == {A, C}
        await table.begin("g/0", "g/1")
        assert [address for _, address in table.dealt] == [A, C]
        await table.end("g/0", "g/1")

    asyncio.run(run())


def test_one_that_is_lost_while_it_is_looked_for_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "FOLLOW_SECONDS", 0.01)

    async def run() -> None:
        table, looks = Table([A, B]), 0
        loop = asyncio.get_running_loop()

        def find(known: Collection[str]) -> Mapping[str, Sequence[str]]:
            nonlocal looks
            looks += 1
            if looks == 1:  # it answered a moment ago
                asyncio.run_coroutine_threadsafe(table.lose(B), loop).result()
            return {"e": (A, B) if looks == 1 else (A,)}

        following = asyncio.create_task(table.pool.follow(find, lambda lost: None))
        while looks < 3:
            await asyncio.sleep(0.01)
        following.cancel()
        assert table.pool.addresses == {"e": [A]}

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
            there = table.pool.addresses["e"]
            loads = Counter(each.server for each in table.pool.in_flight.values())
            if what == "begin":
                await table.begin(f"g{number}/{begun}")
                begun += 1
                assert loads[table.dealt[-1][1]] == min(loads[each] for each in there)
            elif what == "end" and table.pool.in_flight:
                name = sorted(table.pool.in_flight)[number % len(table.pool.in_flight)]
                free[name] = free.get(name, 0) + 1
                await table.end(name)
            elif what == "lose":
                address = there[number % len(there)]
                assert await table.lose(address) == (len(there) > 1 or address not in there)
            elif what == "join":
                there += [each for each in (A, B, C) if each not in there][:1]
        assert {each.server for each in table.pool.in_flight.values()} <= {*table.pool.addresses["e"]}
        for name in [*table.pool.in_flight]:
            free[name] = free.get(name, 0) + 1
            await table.end(name)
        assert free == {name: 1 for name in table.tasks} and len(table.tasks) == begun
        assert all(task.done() for task in table.tasks.values()) and not any(table.pool._loads.values())

    asyncio.run(run())


def test_a_sampler_isolates_a_deadly_rollout_and_has_rows_of_all_groups() -> None:
    """A deadly rollout takes servers down among others, and then alone; each time another server is started."""
    table = Table([A, B])
    failed, groups = list[str](), ["deadly", "a", "b", "c"]
    done = list[str]()

    class Runner:
        unproven = None

        async def run(self, assignment: dict[str, Any], task: Any, slot: Any) -> Any:
            table.dealt.append((assignment["assignment_id"], slot._rollout.server))
            await slot.play(assignment["assignment_id"])
            return [], []

        def rows_without_trace(self, assignment: dict[str, Any], failure: Failure, *_: Any) -> Any:
            failed.append(assignment["assignment_id"])
            return [], []

    sampler = object.__new__(BatchSampler)
    parts = {"runner": Runner(), "plan": SamplingPlan(), "quota": GroupQuota({}), "limiter": Limiter(6)}
    parts |= {"begun": set(), "live": {}, "stopped": set(), "waiting": {}, "is_isolating": False}
    parts |= {"replicas": Replicas([], 0, None), "on_group": lambda group_id, _: done.append(group_id)}
    vars(sampler).update(parts | {"servers": table.pool})
    table.pool._record_loss, table.pool._isolates = sampler._record_loss, sampler.plan.isolation.isolates
    rows = assigned("e", groups, 2).to_pylist()

    async def work() -> None:
        sampler.commit_lock = asyncio.Lock()
        prepare: Callable[[Any], PreparedGroups] = lambda _: PreparedGroups([], {})  # noqa: E731
        prepared = PreparedGroups(rows, {("e", name): "{}" for name in groups})
        sampling = asyncio.create_task(sampler._sample_groups(prepared, prepare))
        await settled()
        while not sampling.done():
            if "deadly/0" in table.pool.in_flight:
                if sampler.is_isolating:
                    assert [*table.pool.in_flight] == ["deadly/0"], "one rollout at a time"
                address = table.pool.in_flight["deadly/0"].server
                assert await table.lose(address)
                table.pool.addresses["e"].append(address)  # its restart
            else:
                await table.end(*table.there())
        await sampling

    asyncio.run(work())
    assert sorted(done) == sorted(groups) and not sampler.live
    assert failed == ["deadly/0"] and Counter(name for name, _ in table.dealt)["deadly/0"] == 4

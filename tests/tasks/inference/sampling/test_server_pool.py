"""Rollouts go to the servers and replicas with the fewest, those of a lost one to its peers, and killers play alone."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.inference.engine.client import OF_POLICY, ServedModel
from tasks.inference.sampling import server_pool
from tasks.inference.sampling.crash_isolation import MIN_LOSSES, CrashIsolation, InFlightRollout
from tasks.inference.sampling.lost_servers import ServiceLost, ServiceWatch
from tasks.inference.sampling.server_pool import CrashesServers, ServerGone, ServerPool
from tests.fixtures.waiting import in_loop

A, B, C = (f"tcp://127.0.0.1:{port}" for port in (1, 2, 3))
ONE, TWO, THREE = (f"http://127.0.0.1:{port}" for port in (1, 2, 3))


def loss(address, environment="e"):
    return ServiceLost(address, "refused", environment)


def row_of(name, environment="e"):
    """An assignment, whose group is in its name."""
    return {"assignment_id": name, "group_id": name.partition("/")[0], "environment": environment}


def members(group, count):
    """The assignments of a group."""
    return [f"{group}/{number}" for number in range(count)]


class Connection:
    """A connection to a server: rollouts are there until they are let go, or the server is given up."""

    def __init__(self):
        self.there = {}

    async def run(self, name):
        """Return where the rollout was played in the end."""
        self.there[name] = asyncio.get_running_loop().create_future()
        try:
            return await self.there[name]
        finally:
            del self.there[name]


class Table:
    """A pool of servers, and the rollouts that each got, in order."""

    def __init__(self, addresses, replicas=(), isolates=False, **options):
        self.pool = ServerPool({"e": addresses}, CrashIsolation(), replicas, **options)
        if not isolates:
            self.pool.isolation.isolates = lambda name: False
        self.connections = {}
        self.dealt = []
        self.tasks = {}
        self.limiter = asyncio.Semaphore(99)
        self.pool._connection = self._connection

    def _connection(self, server):
        return self.connections.setdefault(server[1], Connection())

    async def _play(self, placed):
        self.dealt.append((placed.assignment_id, placed.replica or placed.server))
        return await self.pool.play(placed, placed.assignment_id)

    async def begin(self, *names):
        for name in names:
            self.tasks[name] = asyncio.create_task(self.pool.run(row_of(name), self.limiter, self._play))
            await settled()

    async def end(self, *names):
        for name in names:
            server = self.pool.in_flight[name].server
            self.connections[server].there[name].set_result(server)
        await settled()

    async def end_all(self):
        await self.end(*self.pool.in_flight)

    async def lose(self, address, environment="e"):
        survived = self.pool.reassign(loss(address, environment))
        if survived:  # the next one of this address is another server
            self.connections.pop(address, None)
        await settled()
        return survived

    def of(self, address):
        return [name for name, place in self.dealt if place == address]

    def loads(self):
        return Counter(placed.server for placed in self.pool.in_flight.values())


async def settled():
    """Let everything run that can."""
    for _ in range(12):
        await asyncio.sleep(0)


@in_loop
async def test_each_rollout_goes_to_the_server_that_has_fewest():
    table = Table([A, B, C])
    await table.begin(*members("g", 9))
    assert Counter(address for _, address in table.dealt) == {A: 3, B: 3, C: 3}, "members of one group"
    await table.end(*table.of(B))
    await table.begin(*members("h", 3))
    assert table.of(B)[3:] == members("h", 3), "the others have three each"
    await table.end_all()
    await table.begin(*members("i", 3))
    assert [address for _, address in table.dealt[-3:]] == [A, C, B], "of several the one that had fewest so far"
    await table.end_all()
    assert not table.pool.in_flight


@in_loop
async def test_what_a_lost_server_has_is_played_by_the_others_and_what_ended_is_not():
    table = Table([A, B, C])
    await table.begin(*members("g", 9))
    ended, *others = table.of(B)
    await table.end(ended)
    lost = loss(B)
    assert table.pool.reassign(lost) and [placed.assignment_id for placed in lost.in_flight] == others
    await settled()
    assert sorted(name for name, _ in table.dealt[9:]) == sorted(others)
    assert sorted(address for _, address in table.dealt[9:]) == [A, C]
    assert await table.lose(A)
    assert not await table.lose(C), "the last one is the loss of the environment's server"
    assert table.loads().keys() == {C}
    await table.end_all()
    ends = {name: await task for name, task in table.tasks.items()}
    assert ends == dict.fromkeys(members("g", 9), C) | {ended: B}


@in_loop
async def test_a_deadly_rollout_plays_alone_after_two_losses_and_fails_after_two_more():
    table = Table([A, B, C], isolates=True)
    await table.begin("deadly/0", "b/0", "c/0")
    await table.lose(A)
    assert table.dealt[3:] == [("deadly/0", B)]
    await table.lose(B)
    assert table.dealt[4:] == [("b/0", C)], "b was at one loss, and the other waits until it is alone"
    table.pool.addresses["e"].append(A)
    await table.end("b/0")
    assert len(table.dealt) == 5
    await table.end("c/0")
    assert table.dealt[5:] == [("deadly/0", A)]
    await table.begin("d/0")
    assert len(table.dealt) == 6, "nothing begins beside it"
    await table.lose(A)
    table.pool.addresses["e"].append(A)
    assert table.dealt[6:] == [("d/0", C)], "it comes after all others"
    await table.end("d/0")
    assert table.dealt[7:] == [("deadly/0", A)], "another step may have crashed it"
    await table.lose(A)
    with pytest.raises(CrashesServers, match="died 2 times while this rollout alone was in flight"):
        await table.tasks["deadly/0"]


@in_loop
async def test_a_group_of_killers_costs_four_losses_alone_and_its_other_members_are_not_tried():
    pool, limiter, alone = ServerPool({"e": [A, B, C]}, CrashIsolation()), asyncio.Semaphore(8), []

    async def crash(placed):
        await asyncio.sleep(0)
        if placed.server in pool.addresses["e"]:
            lost, num_in_flight = loss(placed.server), len(pool.in_flight)
            assert pool.reassign(lost)
            if lost.is_isolated:
                alone.append(num_in_flight)
            pool.addresses["e"].append(placed.server)  # it is started again
        raise ServerGone

    rollouts = (pool.run(row_of(name), limiter, crash) for name in members("g", 8))
    ends = await asyncio.gather(*rollouts, return_exceptions=True)
    assert alone == [1] * 4
    causes = [end.failure.message.partition(":")[0] for end in ends if isinstance(end, CrashesServers)]
    assert Counter("not tried" if cause == "not tried" else "died" for cause in causes) == {"died": 2, "not tried": 6}


@in_loop
async def test_isolated_rollouts_hold_no_place_of_the_limit_and_wait_for_all_environments():
    pool, limiter, order = ServerPool({"a": [A], "b": [B]}, CrashIsolation()), asyncio.Semaphore(2), []
    killers = [InFlightRollout(name, "a", "a") for name in members("a", 3)]
    for _ in range(MIN_LOSSES):
        pool.isolation.record(killers)

    async def play(placed):
        order.append(placed.assignment_id)
        assert placed.environment == "b" or len(pool.in_flight) == 1 == 2 - limiter._value
        await settled()

    rows = [row_of(name, name[0]) for name in (*members("a", 3), *members("b", 6))]
    running = [asyncio.create_task(pool.run(row, limiter, play)) for row in rows]
    await asyncio.sleep(0)
    running[1].cancel()  # while it waits
    await asyncio.gather(*running, return_exceptions=True)
    assert order == [*members("b", 6), "a/0", "a/2"]
    assert not pool.in_flight and limiter._value == 2


@in_loop
async def test_groups_share_a_replica_and_rollouts_of_a_lost_one_are_played_at_the_others():
    table = Table([A], [ONE, TWO, THREE])
    await table.begin(*(name for group in "abcdef" for name in members(group, 2)))
    places = [{url for name, url in table.dealt if name[0] == group} for group in "abcdef"]
    assert Counter(url for (url,) in places) == {ONE: 2, TWO: 2, THREE: 2}
    ended, *others = table.of(TWO)
    await table.end(ended)
    assert await table.lose(TWO, OF_POLICY)
    assert sorted(name for name, _ in table.dealt[12:]) == sorted(others)
    assert not {url for _, url in table.dealt[12:]} & {TWO} and not table.pool.isolation._losses
    assert await table.lose(ONE, OF_POLICY)
    assert not await table.lose(THREE, OF_POLICY), "the last one is the engine"
    await table.end_all()
    assert [await task for task in table.tasks.values()] == [A] * 12
    for group in "abcdef":
        table.pool.finish(group)
    assert not table.pool._replica_of


def test_where_all_exchange_weights_a_lost_replica_is_the_loss_of_the_engine():
    assert not Table([A], [ONE, TWO], spares_replicas=False).pool.reassign(loss(TWO, OF_POLICY))
    assert not Table([A], [ONE, TWO]).pool.reassign(loss(THREE, OF_POLICY)), "a teacher's"
    assert not Table([A], [ONE, TWO], least=2).pool.reassign(loss(TWO, OF_POLICY)), "fewer than the lower bound"


@in_loop
async def test_errors_and_cancellations_leave_nothing_in_flight():
    async def fail(placed):
        raise LookupError("an environment's own")

    table = Table([A])
    with pytest.raises(LookupError):
        await table.pool.run(row_of("x/0"), table.limiter, fail)
    await table.begin("g/0")
    table.tasks["g/0"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await table.tasks["g/0"]
    assert not table.pool.in_flight


def test_the_clock_does_not_wait_for_a_lost_replica():
    pool = ServerPool({}, CrashIsolation(), [ONE, TWO])
    watch = ServiceWatch([ServedModel(ONE, "", other_urls=(TWO,))], pool.addresses, pool.reassign)
    watch.lose(loss(TWO, OF_POLICY))
    watch._note_silence(TWO, 0.0)  # a request to it ends after a connection was refused
    assert not watch.clock.num_silences and [*watch.engines] == [ONE]


def test_a_second_report_of_a_loss_is_ignored_and_the_last_server_is_raised():
    pool = ServerPool({"e": [A, B]}, CrashIsolation())
    watch = ServiceWatch([ServedModel(ONE, "")], pool.addresses, pool.reassign)
    watch.lose(loss(A))
    watch.lose(loss(A))
    for lost in (loss(B), ServiceLost(ONE, "refused")):
        with pytest.raises(ServiceLost, match=f"'e' at {B}"):
            watch.lose(lost)


@pytest.fixture
def follows_often(monkeypatch):
    monkeypatch.setattr(server_pool, "FOLLOW_SECONDS", 0.01)


async def run_until(coroutine, is_enough):
    """Run a coroutine until something holds."""
    running = asyncio.create_task(coroutine)
    while not is_enough():
        await asyncio.sleep(0.01)
    running.cancel()


@in_loop
async def test_servers_join_and_those_whose_process_has_ended_are_lost(follows_often):
    table, lost, asked = Table([A, B]), [], []
    there = [(A, B), (A, B, C), (A, C), (A, C)]

    def find(known):
        asked.append(known)
        return {"e": there.pop(0) if len(there) > 1 else there[0]}

    def lose(service):
        lost.append(service.address)
        assert table.pool.reassign(service)

    await run_until(table.pool.follow(find, SimpleNamespace(lose=lose)), lambda: len(asked) >= 5)
    assert lost == [B] and table.pool.addresses["e"] == [A, C]
    assert asked[0] == {A, B} and asked[-1] == {A, C}
    await table.begin("g/0", "g/1")
    assert [address for _, address in table.dealt] == [A, C]
    await table.end_all()


@in_loop
async def test_one_that_is_lost_while_it_is_looked_for_does_not_join(follows_often):
    table, looks, loop = Table([A, B]), [], asyncio.get_running_loop()

    def find(known):
        looks.append(known)
        if len(looks) == 1:  # it answered a moment ago
            asyncio.run_coroutine_threadsafe(table.lose(B), loop).result()
            return {"e": (A, B)}
        return {"e": (A,)}

    await run_until(table.pool.follow(find, SimpleNamespace(lose=list)), lambda: len(looks) >= 3)
    assert table.pool.addresses["e"] == [A]


STEPS = st.lists(st.tuples(st.sampled_from(["begin", "end", "lose", "join"]), st.integers(0, 9)), max_size=60)


@settings(deadline=None, max_examples=200)
@given(steps=STEPS, seed=st.integers(0, 9))
@in_loop
async def test_whatever_happens_each_rollout_ends_once_at_a_server_that_is_there(steps, seed):
    table, begun, free = Table([A, B, C]), 0, Counter()

    async def end(name):
        free[name] += 1
        await table.end(name)

    for what, number in [*steps, ("begin", seed)]:
        there = table.pool.addresses["e"]
        if what == "begin":
            loads = table.loads()
            await table.begin(f"g{number}/{begun}")
            begun += 1
            assert loads[table.dealt[-1][1]] == min(loads[address] for address in there)
        elif what == "end" and table.pool.in_flight:
            await end(sorted(table.pool.in_flight)[number % len(table.pool.in_flight)])
        elif what == "lose":
            has_peers = len(there) > 1
            assert await table.lose(there[number % len(there)]) == has_peers
        elif what == "join":
            there += [address for address in (A, B, C) if address not in there][:1]
    assert table.loads().keys() <= {*table.pool.addresses["e"]}
    for name in [*table.pool.in_flight]:
        await end(name)
    assert free == dict.fromkeys(table.tasks, 1) and len(table.tasks) == begun
    assert all(task.done() for task in table.tasks.values())


@in_loop
async def test_a_replica_that_leaves_ends_its_rollouts_gets_no_others_and_is_watched_until_then(follows_often):
    table, watch, known, there = Table([A], [ONE]), ServiceWatch([ServedModel(ONE, "key")], {}), [], [{ONE, TWO}]
    await table.begin("a/0")

    def find(addresses):
        known.append(addresses - {A})
        return {OF_POLICY: there[0]}

    async def follow(is_enough):
        await run_until(table.pool.follow(find, watch), is_enough)

    await follow(lambda: TWO in table.pool.addresses[OF_POLICY])
    assert watch.engines == {ONE: "key", TWO: "key"}
    await table.begin("b/0", "b/1")
    there[0] = {ONE}
    await follow(lambda: TWO not in table.pool.addresses[OF_POLICY])
    await table.begin("b/2", "c/0")
    assert table.of(TWO) == ["b/0", "b/1"] and table.of(ONE) == ["a/0", "b/2", "c/0"]
    await table.end("b/0")
    known.clear()
    await follow(lambda: len(known) > 2)
    assert known[-1] == {ONE, TWO} and TWO in watch.engines, "it has a rollout left"
    watch.clock.note_silence(TWO, 1.0)
    assert await table.lose(TWO, OF_POLICY) and table.of(ONE)[3:] == ["b/1"], "it is lost before it has left"
    await follow(lambda: known[-1] == {ONE})
    assert watch.engines == {ONE: "key"} and not watch.clock.is_silent(TWO)
    there[0] = set()
    known.clear()
    await follow(lambda: len(known) > 2)
    assert table.pool.addresses[OF_POLICY] == [ONE], "the last one stays"
    await table.end_all()


@in_loop
async def test_groups_go_where_fewest_requests_share_the_free_cache():
    said = {ONE: (0.0, 0.0), TWO: (5.0, 0.2)}  # the other one serves another run as well
    table = Table([A], [ONE, TWO], load=said.get)
    await table.begin(*(f"{group}/0" for group in "abcdefghi"))
    assert [len(table.of(url)) for url in (ONE, TWO)] == [7, 2], "8 a cache there, and 6 for 80 % of one here"
    await table.end_all()

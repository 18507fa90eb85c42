"""Pools of environment workers: how many there are, where they log, and what happens when one is killed or told to end.

The servers are started as a run starts them, and every rollout is held at its setup: no model is called.
"""

import asyncio
import os
import re
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from configs.environments import ElasticPool, EnvironmentConfig, StaticPool
from configs.run import RunConfig
from flows.services import base
from flows.services.base import Supervisor
from flows.services.environments import EnvironmentServers
from flows.services.ownership import identity, owned_processes, start_time
from flows.services.process import ServiceFailed
from tasks.inference.environments import pool as environment_pool
from tasks.inference.environments import servers as environments
from tests.fixtures.faults import happened
from tests.fixtures.waiting import PATIENCE, until

pytestmark = pytest.mark.engine

STARTED = re.compile(r"started worker (\d+), process (\d+)")
HOLDING = re.compile(r"holding (\w+) in process (\d+)")


def holding(name, **settings):
    """An environment whose rollouts wait for ever, and say so in the log."""
    return EnvironmentConfig(
        name=name, taskset={"id": "misbehaving_taskset", "faults": ["holds"], "task": {"name": name}}, **settings
    )


STATIC = holding("fixed", pool=StaticPool(num_workers=2), max_restarts=0, hang_seconds=20.0)
ELASTIC = holding("growing", pool=ElasticPool(max_workers=2, multiplex=1))
BROKEN = EnvironmentConfig(name="broken", taskset={"id": "unloadable"}, pool=ElasticPool(max_workers=2))


class Pools:
    """The servers of this module, started side by side, with their logs."""

    def __init__(self, supervisor):
        self.supervisor = supervisor
        self.servers = EnvironmentServers(supervisor, RunConfig(environments=(STATIC, ELASTIC)), "key")
        self.broken = EnvironmentServers(supervisor, RunConfig(environments=(BROKEN,)), "key")
        self.broken.begin()
        self.addresses = {
            name: address for name, (address,) in self.servers.addresses([STATIC.name, ELASTIC.name]).items()
        }

    def log(self, name):
        return (self.supervisor.directory / f"environment-{name}.log").read_text()

    def workers(self, name):
        """Process ids of the workers that were started, in their order."""
        return [int(process) for _, process in STARTED.findall(self.log(name))]

    def sockets(self, name):
        """Addresses of the workers that are up."""
        return re.findall(r"EnvServer up: .* address=(ipc://\S+)", self.log(name))

    def holders(self, name):
        """Process ids of those that hold a rollout."""
        return [int(process) for _, process in HOLDING.findall(self.log(name))]


@contextmanager
def rollouts(address, count):
    """So many rollouts under way until the block ends, asked for by a loop in a thread of its own."""
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.serve.client import EnvClient
    from verifiers.v1.types import SamplingConfig

    task = {"fault": "holds", "prompt": "x", "idx": 0}
    loop, enough = asyncio.new_event_loop(), asyncio.Event()

    async def ask():
        client, of_model = EnvClient(address), EvalClientConfig(base_url="http://127.0.0.1:9/v1")
        asked = [asyncio.create_task(client.run(of_model, "m", SamplingConfig(), task)) for _ in range(count)]
        await enough.wait()
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await client.close()

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(loop.run_until_complete, ask())
        try:
            yield
        finally:
            loop.call_soon_threadsafe(enough.set)
            done.result(PATIENCE)
            loop.close()


@pytest.fixture(scope="module")
def pools(tmp_path_factory, plugins_of_module):
    with Supervisor("run", tmp_path_factory.mktemp("pools")) as supervisor:
        yield Pools(supervisor)


@pytest.mark.essential
def test_a_static_pool_starts_its_workers_at_once_and_shares_the_rollouts(pools):
    assert len(pools.workers("fixed")) == 2
    with rollouts(pools.addresses["fixed"], 4):
        until(lambda: len(pools.holders("fixed")) == 4, lambda: pools.log("fixed")[-3000:])
    assert sorted(pools.holders("fixed")) == sorted(pools.workers("fixed") * 2)


@pytest.mark.essential
def test_an_elastic_pool_grows_with_load_to_its_bound(pools):
    assert len(pools.workers("growing")) == 1
    with rollouts(pools.addresses["growing"], 3):
        until(lambda: len(pools.holders("growing")) == 3, lambda: pools.log("growing")[-3000:])
    assert len(pools.workers("growing")) == 2, "one for each rollout, and two at most"


@pytest.mark.essential
def test_what_an_environment_logs_in_a_worker_is_in_its_own_log(pools):
    for own, other in (("fixed", "growing"), ("growing", "fixed")):
        assert f"misbehaving: holding {own} in process" in pools.log(own)
        assert f"holding {other}" not in pools.log(own)


@pytest.mark.nightly
def test_an_environment_that_no_worker_can_load_fails_before_anything_is_sampled(pools):
    with pytest.raises(ServiceFailed, match=r"'environment broken' ended with status 4 before it was ready") as failure:
        pools.broken.addresses(["broken"])
    assert "RuntimeError: the planted wrong setting" in str(failure.value)
    assert pools.broken._handles["broken"].generation == 1


def test_the_end_of_a_worker_is_noticed_though_what_it_started_lives_on(monkeypatch):
    """A child that inherits a worker's files keeps its sentinel open, by which multiprocessing tells the end."""
    worker = subprocess.Popen(["sh", "-c", "exit 7"])
    held = os.pipe()
    pool = environment_pool.WatchedPool.__new__(environment_pool.WatchedPool)
    pool.ending, pool.lost = threading.Event(), ""
    told = []
    monkeypatch.setattr(os, "kill", lambda *told_of: told.append(told_of))
    process = SimpleNamespace(pid=worker.pid, exitcode=7, sentinel=held[0])
    watch = threading.Thread(target=pool._wait_for_end, args=(3, process), daemon=True)
    watch.start()
    watch.join(PATIENCE)
    assert told == [(os.getpid(), signal.SIGTERM)]
    assert pool.lost == f"worker 3, process {worker.pid}, ended with status 7"
    assert worker.wait() == 7, "who started it is told, too"
    for each in held:
        os.close(each)


@pytest.mark.essential
def test_a_client_that_leaves_before_its_answer_does_not_end_the_server(pools):
    from verifiers.v1.serve.client import EnvClient

    handle = pools.servers._handles["growing"]

    async def leave(broker):
        client = EnvClient(pools.addresses["growing"])
        assert await client.health(PATIENCE)
        os.kill(broker, signal.SIGSTOP)
        assert not await client.health(0.3), "the request is on its way, and nobody answers"
        await client.close()
        os.kill(broker, signal.SIGCONT)

    asyncio.run(leave(handle.report["pid"]))
    assert environments.answers(pools.addresses["growing"], seconds=PATIENCE)
    assert handle.generation == 1 and "Host unreachable" not in pools.log("growing")


@pytest.mark.essential
def test_a_model_call_of_no_rollout_is_refused(pools):
    (url, *_) = re.findall(r"interception up: url=(\S+)", pools.log("growing"))
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for headers in ({}, {"Authorization": "Bearer key"}):
        assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, trust_env=False).status_code == 401


@pytest.mark.essential
def test_a_server_that_someone_else_runs_is_used_and_left_alone(pools, tmp_path, monkeypatch):
    address = pools.addresses["growing"]
    with Supervisor("another", tmp_path) as supervisor:
        servers = EnvironmentServers(supervisor, RunConfig(environments=(holding("theirs", address=address),)), "key")
        servers.check_available()
        assert servers.addresses(["theirs"]) == {"theirs": (address,)}
    assert environments.answers(address, PATIENCE)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "no log and no report"
    monkeypatch.setattr(base, "EXTERNAL_SECONDS", 0.2)
    with Supervisor("another", tmp_path) as supervisor:
        gone = holding("theirs", address="tcp://127.0.0.1:9")
        with pytest.raises(ServiceFailed, match=r"'environment theirs' at tcp://127.0.0.1:9 is not ready after 0.2 s"):
            EnvironmentServers(supervisor, RunConfig(environments=(gone,)), "key").check_available()


@pytest.mark.nightly
@pytest.mark.fault(
    "services", "a worker of an environment server is stopped", "it is named and killed, the server is started again"
)
def test_a_worker_that_hangs_is_killed_and_named_and_the_server_ends_for_another_to_be_started(pools):
    # One that still loads its environment may take as long as it likes: it has not answered the broker yet.
    until(lambda: pools.log("fixed").count("is watched") == 2, lambda: pools.log("fixed"))
    workers, handle = pools.workers("fixed"), pools.servers._handles["fixed"]
    assert all(environments.answers(each, PATIENCE) for each in pools.sockets("fixed"))
    os.kill(workers[1], signal.SIGSTOP)
    happened(f"SIGSTOP to {workers[1]}")
    with handle._changed:
        assert handle._changed.wait_for(lambda: handle._failure, PATIENCE), pools.log("fixed")
    assert "worker 1 does not answer for 20 s: killed" in pools.log("fixed")
    assert f"worker 1, process {workers[1]}, ended with status -9: the server ends" in pools.log("fixed")
    assert [start_time(process) for process in workers] == [None, None]
    with pytest.raises(ServiceFailed, match=r"'environment fixed' .* in generation 1: no restart of 0 is left"):
        pools.servers.addresses(["fixed", "growing"])


@pytest.mark.essential
def test_servers_that_are_told_to_end_leave_nothing_behind(pools):
    directory = re.findall(r"address=ipc://(\S+)/\d", pools.log("growing"))[0]
    assert Path(directory).parent == pools.supervisor._temporary, "it goes also where the broker is killed"
    with rollouts(pools.addresses["growing"], 1):
        pools.supervisor.close()
    assert owned_processes(identity()) == []
    for name in ("fixed", "growing"):
        log = pools.log(name)
        assert log.rstrip().endswith("EnvServerPool down"), log
        # Python's tracker reports what was left. Two tracebacks are no fault of ours: verifiers logs progress that a
        # closing worker could not send, and Python a second signal after the end of the event loop.
        log = re.sub(r"Exception ignored when trying to write to the signal.*?OSError[^\n]*", "", log, flags=re.DOTALL)
        records = re.split(r"\n(?=\d{4}-\d\d-\d\d )", log)
        others = [record for record in records if "verifiers.v1.serve.delta: failed to send" not in record]
        assert not re.search("Traceback|KeyboardInterrupt|resource_tracker", "\n".join(others)), pools.log(name)
    assert "the server ends" not in pools.log("growing"), "its workers ended because they were told to"
    assert not os.path.exists(directory)
    assert not list(Path(pools.supervisor.directory).glob("*.runtimes"))

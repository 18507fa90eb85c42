"""Two real servers of one environment: the tokens of one, and a server that is killed costs no row."""

import os
import signal
from collections import Counter

import pytest

from configs.environments import EnvironmentConfig
from configs.run import RunConfig
from flows.services.base import Supervisor
from flows.services.environments import EnvironmentServers
from flows.services.ownership import identity, owned_processes
from tasks.inference.engine.client import OF_POLICY, ServedModel
from tasks.inference.sampling.crash_isolation import CrashIsolation
from tasks.inference.sampling.sampler import BatchSampler
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import KEY, assigned, examples_of
from tests.fixtures.sampled import collected, failures
from tests.fixtures.waiting import until

pytestmark = pytest.mark.engine
REVERSE = EnvironmentConfig(name="reverse", taskset={"id": "sample_reverse_text", "num_examples": 20}, servers=2)


def tokens(groups):
    """The tokens of each rollout, sampled ones and others, by its assignment."""
    found = {}
    for tables in groups.values():
        traces, messages = tables["traces"].to_pylist(), tables["messages"].to_pylist()
        assert not failures(traces)
        for trace in traces:
            own = (row["token_ids"] for row in messages if row["trace_id"] == trace["trace_id"])
            found[trace["assignment_id"]] = [token for ids in own for token in ids]
    return found


def test_a_killed_server_costs_no_row(small_engine, view, tmp_path):
    examples = examples_of(REVERSE)
    assignments = assigned("reverse", examples["example_id"].to_pylist()[:12], 4)
    losses, isolation = [], CrashIsolation()
    isolation.record = lambda lost: losses.append(lost) is not None

    def sample(servers, addresses, on_first):
        groups, take = collected(on_first)
        sampler = BatchSampler(
            served={OF_POLICY: ServedModel(small_engine.url, KEY, salt="of these servers")},
            addresses={"reverse": addresses},
            policy=Policy("policy", 0),
            step=0,
            config=view(REVERSE, max_in_flight=16),
            on_group=take,
            isolation=isolation,
            find=[servers.addresses_now] if len(addresses) > 1 else (),
        )
        servers_now, move = sampler.servers, sampler.servers.move

        def watched(rollout):
            loads = Counter(other.server for other in servers_now.in_flight.values() if other is not rollout)
            move(rollout)
            least = min(loads[address] for address in servers_now.addresses["reverse"])
            assert loads[rollout.server] == least, "the one that has fewest takes it, whoever is faster"

        servers_now.move = watched
        sampler.sample(assignments, examples)
        return tokens(groups), sampler.servers.num_placed

    with Supervisor("several", tmp_path) as supervisor:
        servers = EnvironmentServers(supervisor, RunConfig(environments=(REVERSE,)), KEY)
        both = lambda: servers.addresses(["reverse"])["reverse"]  # noqa: E731
        until(lambda: len(both()) == 2, lambda: "there are no two servers")
        second = servers._handles["reverse-2"]

        alone, _ = sample(servers, both()[:1], lambda: None)
        shared, dealt = sample(servers, both(), lambda: None)
        assert len(alone) == assignments.num_rows and shared == alone, "whoever takes them, tokens are the same"
        # Of the first sixteen each took eight; how many more is a matter of how fast each is on a busy machine.
        assert sorted(dealt) == sorted(("reverse", each) for each in both()) and min(dealt.values()) >= 8, dealt

        killed, dealt = sample(servers, both(), lambda: os.kill(second.report["pid"], signal.SIGKILL))
        (lost,) = losses
        assert killed == alone and 1 <= len(lost) <= 16
        assert dealt.total() == assignments.num_rows + len(lost), "what was in flight there, and no more"
        until(lambda: len(both()) == 2, lambda: "the killed server did not come back")
        assert second.generation == 2 and servers._handles["reverse"].generation == 1
    assert owned_processes(identity()) == []

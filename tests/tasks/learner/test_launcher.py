"""Where the store listens at which the learner's nodes meet: at the address that they were told, and nowhere else."""

import socket
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tasks.learner import launcher
from tests.fixtures.serving import free_port
from tests.fixtures.waiting import PATIENCE

pytestmark = pytest.mark.engine


def listening(port):
    """Return the addresses at which this process listens on a port."""
    found = psutil.Process().net_connections("tcp")
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port}


@pytest.mark.parametrize(("host", "bound"), [("127.0.0.2", {"127.0.0.2"}), ("localhost", {"127.0.0.1"})])
def test_nodes_meet_at_one_address(host, bound):
    port = free_port()
    nodes = [launcher.BoundRendezvous(host, port, rank, 2, "learner", PATIENCE) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda node: node.next_rendezvous(), nodes)
    first.store.set("said", "by the first")
    assert second.store.get("said") == b"by the first"
    assert [(each.rank, each.world_size) for each in (first, second)] == [(0, 2), (1, 2)]
    assert {each.bootstrap_store_info.master_port for each in (first, second)} == {port}
    found = listening(port)
    assert found and found <= bound


def test_a_name_is_listened_at_where_it_means_one_address_everywhere(monkeypatch):
    known = {"node-0": ["10.0.0.5", "10.0.0.5"], "debian": ["127.0.1.1"], "two": ["10.0.0.5", "10.1.0.5"]}
    monkeypatch.setattr(launcher.socket, "gethostbyname_ex", lambda host: (host, [], known[host]))
    assert {host: launcher.address_everywhere(host) for host in known} == {
        "node-0": "10.0.0.5",
        "debian": "",
        "two": "",
    }
    monkeypatch.undo()
    assert launcher.address_everywhere("no-such-name.invalid") == launcher.address_everywhere("::1") == ""


def test_one_node_has_a_free_port_of_its_own():
    met = launcher.BoundRendezvous("127.0.0.1", 0, 0, 1, "learner", PATIENCE).next_rendezvous()
    port = met.bootstrap_store_info.master_port
    assert port and listening(port) == {"127.0.0.1"}


def test_an_address_of_another_machine_is_left_to_torchrun_and_one_that_is_taken_is_not():
    assert launcher.listener_at("203.0.113.9", 0) is None
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        launcher.listener_at("127.0.0.1", taken.getsockname()[1])

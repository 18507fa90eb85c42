"""A shared tool server that is gone: its environment server is started again, and does not fail rollout by rollout."""

import asyncio
import signal
import socket
from pathlib import Path

import pytest

from configs.run import RunConfig
from flows.services.base import Supervisor
from flows.services.environments import EnvironmentServers
from flows.services.guardian import descendants, send
from tasks.inference.environments.host import refuses
from tasks.inference.environments.servers import answers
from tests.fixtures.waiting import PATIENCE, until

pytestmark = pytest.mark.engine


def commands(pid: int) -> dict[int, str]:
    """Return the command lines of the processes below one."""
    found = {}
    for each in descendants(pid):
        try:
            found[each] = Path(f"/proc/{each}/cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended meanwhile
            continue
    return found


def test_a_server_without_its_tools_is_started_again(tmp_path: Path) -> None:
    environment = {"name": "calc", "taskset": {"id": "calc_tools", "num_examples": 4}}
    config = RunConfig.model_validate({"environments": [environment]})
    with Supervisor("tools", tmp_path) as supervisor:
        servers = EnvironmentServers(supervisor, config, "")
        servers.addresses()
        handle = servers._handles["calc"]
        before = handle.generation
        assert handle.pid is not None
        tools = [pid for pid, line in commands(handle.pid).items() if "calc_tools.server" in line]
        assert tools, commands(handle.pid)
        send(signal.SIGKILL, tools)  # one may go by itself when another has
        until(lambda: handle.generation != before, lambda: (tmp_path / "environment-calc.log").read_text()[-3000:])
        assert answers(servers.addresses()["calc"], PATIENCE)
    log = (tmp_path / "environment-calc.log").read_text()
    assert "the shared tool server" in log and "is gone: the environment server ends" in log


def test_only_a_refusal_is_one() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert asyncio.run(refuses("127.0.0.1", port)), "bound, and nobody listens"
        listening.listen()
        assert not asyncio.run(refuses("127.0.0.1", port)), "nobody accepts, but connections are taken"
    assert asyncio.run(refuses("127.0.0.1", port)), "and none is left"

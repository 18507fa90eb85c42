"""Environments that take their server down: it is started again, and every rollout is accounted for.

Real servers below a real supervisor, the small engine, and the rollout stage as a run has it.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pyarrow as pa
import pytest

from configs.environments import EnvironmentConfig
from configs.run import View
from flows.services.base import Supervisor
from flows.services.environments import EnvironmentServers
from flows.services.ownership import identity, owned_processes
from tasks.inference.engine.client import MODEL, ServedModel
from tasks.rollout.stage import STAGE, RolloutInputs, rollout
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import KEY, assigned, config_of, examples_of

pytestmark = pytest.mark.engine


NAMES = ["fine 1", "dies 1", "fine b 1"]


class Handed:
    """The groups that were handed over, in memory."""

    def __init__(self):
        self.traces = {}

    def rows(self):
        return [row for group in self.traces.values() for row in group]

    def finished_units(self):
        return set(self.traces)

    def put(self, tables):
        rows = tables["traces"].to_pylist()
        assert rows[0]["group_id"] not in self.traces, "a group is handed over once"
        self.traces[rows[0]["group_id"]] = rows


class OneEngine:
    """The service of an engine that somebody else keeps at its policy."""

    def __init__(self, engine):
        self.served = ServedModel(engine.url, KEY, MODEL, "policy")

    def serve(self, policy):
        return self.served

    @contextmanager
    def pinned(self, policy):
        yield self.served


def rolled_out(engine, models, directory, environment, rows, **own):
    """Do the stage over assignments of one environment; return what was handed over, and the server's generation."""
    section = EnvironmentConfig.model_validate(environment)
    config = config_of(models["a"], section, **({"max_tokens": 4} | own))
    handed = Handed()
    with Supervisor("run", directory) as supervisor:
        servers = EnvironmentServers(supervisor, config, KEY)
        tables = rows, examples_of(section)
        services = (OneEngine(engine), servers, SimpleNamespace(serve=None))
        inputs = RolloutInputs(*tables, 1, Policy("policy-of-losses", 0), handed, *services)
        rollout(inputs, View(config, STAGE.sections, "rollout"))
        generation = servers._handles[environment["name"]].generation
    assert owned_processes(identity()) == []
    return handed, generation


@pytest.mark.nightly
@pytest.mark.usefixtures("plugins")
def test_rollouts_of_a_lost_server_are_sampled_again(small_engine, models, tmp_path):
    """One rollout blocks the server's event loop, one calls `sys.exit`, each the first time that it is scored."""
    faults = ("blocks", "leaves")
    names = ["fine", *faults]
    taskset = {"id": "misbehaving_taskset", "faults": names, "task": {"directory": str(tmp_path)}}
    environment = {"name": "bad", "taskset": taskset, "hang_seconds": 10.0}
    directory = tmp_path / "services"
    handed, generation = rolled_out(
        small_engine, models, directory, environment, assigned("bad", names, 2), max_attempts=1
    )
    rows = handed.rows()
    assert sorted(row["assignment_id"] for row in rows) == sorted(
        f"{name}/{member}" for name in names for member in (0, 1)
    )
    assert {(row["error_class"], row["reward"]) for row in rows} == {(None, 0.5)}
    log = (directory / "environment-bad.log").read_text()
    assert all((tmp_path / f"{fault}.once").exists() for fault in faults)
    assert "the one before did not answer any more and was ended" in log
    # The exit is there as Python says it: taking a process apart may last until it counts as hanging.
    assert generation == 2 or "\nplanted\n" in log


@pytest.mark.nightly
@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("servers", [1, 3])
def test_a_killer_is_one_row_and_costs_the_others_nothing(small_engine, models, tmp_path, servers):
    environment = {"name": "deadly", "servers": servers, "taskset": {"id": "counted_taskset", "names": NAMES}}
    rows = assigned("deadly", NAMES, 2)
    rows = rows.filter(pa.array([name != "dies 1/1" for name in rows["assignment_id"].to_pylist()]))
    own = {"max_attempts": 2, "timeout_seconds": 240.0}
    handed, _ = rolled_out(small_engine, models, tmp_path / "services", environment, rows, **own)
    found = {row["assignment_id"]: row for row in handed.rows()}
    killer = found.pop("dies 1/0")
    assert {name: row["error_class"] for name, row in found.items()} == dict.fromkeys(
        ("fine 1/0", "fine 1/1", "fine b 1/0", "fine b 1/1")
    )
    assert (killer["error_class"], killer["error_type"]) == ("infrastructure", "ServerLost")
    assert "environment server 'deadly' died 2 times while this rollout alone was in flight" in killer["error_message"]

"""Environments that take their server down: it is started again, and every rollout is accounted for.

Real servers below a real supervisor, the small engine, and the rollout stage as a run has it.
"""

import pyarrow as pa
import pytest

from flows.services import base, environments
from tests.fixtures.faults import happened
from tests.fixtures.hosts import assigned
from tests.fixtures.rolled_out import rolled_out

pytestmark = pytest.mark.engine


NAMES = ["fine 1", "dies 1", "fine b 1"]


@pytest.mark.nightly
@pytest.mark.usefixtures("plugins")
def test_rollouts_of_a_lost_server_are_sampled_again(small_engine, models, tmp_path):
    """One rollout blocks the server's event loop, one calls `sys.exit`, each the first time that it is scored."""
    faults = ("blocks", "leaves")
    names = ["fine", *faults]
    taskset = {"id": "misbehaving_taskset", "faults": names, "task": {"directory": str(tmp_path)}}
    environment = {"name": "bad", "taskset": taskset, "hang_seconds": 10.0}
    directory = tmp_path / "services"
    handed, generations = rolled_out(
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
    assert generations["environment bad"] == 2 or "\nplanted\n" in log


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


@pytest.mark.nightly
@pytest.mark.usefixtures("plugins")
@pytest.mark.fault("services", "a reward function sleeps for ever", "a row with its error; the others are scored")
def test_a_reward_function_that_sleeps_for_ever_is_one_row(small_engine, models, tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "GRACE_SECONDS", 1.0)  # after which a server that sleeps is killed
    names = ["fine", "sleeps"]
    taskset = {"id": "misbehaving_taskset", "faults": names, "task": {"directory": str(tmp_path)}}
    environment = {"name": "bad", "taskset": taskset, "hang_seconds": 8.0}
    rows = assigned("bad", names, 1)
    handed, generations = rolled_out(small_engine, models, tmp_path / "services", environment, rows)
    found = {row["assignment_id"]: (row["error_type"], row["reward"]) for row in handed.rows()}
    assert found == {"fine/0": (None, 0.5), "sleeps/0": ("ServerLost", None)}
    happened(f"{generations['environment bad']} servers")


@pytest.mark.nightly
@pytest.mark.usefixtures("plugins")
@pytest.mark.fault("services", "reward functions fork, and print 100 MB", "all is scored, no process left, a short log")
def test_reward_functions_that_fork_or_print_cost_neither_processes_nor_disk(
    small_engine, models, tmp_path, monkeypatch
):
    monkeypatch.setattr(base, "LOG_BYTES", 2**20)
    names = ["fine", "forks", "prints"]
    taskset = {"id": "misbehaving_taskset", "faults": names, "task": {"directory": str(tmp_path)}}
    environment, directory = {"name": "bad", "taskset": taskset}, tmp_path / "services"
    handed, generations = rolled_out(small_engine, models, directory, environment, assigned("bad", names, 2))
    assert [(row["error_message"], row["reward"]) for row in handed.rows()] == [(None, 0.5)] * 6
    assert generations["environment bad"] == 1
    forked = [path.name for path in tmp_path.glob("forked-*")]
    assert len(forked) >= 2, "a child of each"
    happened(f"{forked}; {len(list(directory.iterdir()))} files")
    assert sum(path.stat().st_size for path in directory.glob("environment-bad.log*")) < 2**24

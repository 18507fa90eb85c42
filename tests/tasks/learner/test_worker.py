"""The learner as processes: the same weights from each, of one rank or of two, and every way to lose one."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from configs.losses import CispoLoss, CustomLoss, GspoLoss, IpoLoss, PpoLoss, SequenceMask, TruncatedImportance
from tasks.learner import protocol, pulse, speed
from tasks.learner.client import Learner
from tasks.learner.protocol import LearnerError, LearnerLost
from tasks.runtime.process_variables import BIND
from tests.fixtures.faults import happened
from tests.fixtures.learner_steps import configure, load_first, resume
from tests.fixtures.serving import free_port
from tests.fixtures.waiting import PATIENCE, until
from tests.tasks.learner.processes import process, train

pytestmark = pytest.mark.engine


def connect(address, model_directory, processes=1, nodes=1, rendezvous="", **training):
    learner = Learner(address)
    configure(learner, processes, nodes=nodes, rendezvous=rendezvous, learning_rate=1e-2, **training)
    load_first(learner, model_directory)
    return learner


def test_two_ranks_equal_one(model_directory, learners, tmp_path):
    """After three steps, and where one loads what two have saved."""
    probes = []
    for processes, address in learners.items():
        directory = tmp_path / str(processes)
        with connect(address, model_directory, processes) as learner:
            assert learner.state()["processes"] == processes
            with pytest.raises(LearnerError, match="is not a model directory"):
                learner.load("bad", str(tmp_path / "nowhere"), fresh_optimizer=True)
            load_first(learner, model_directory)
            for step in range(3):
                train(learner, step, directory, save_optimizer=True)
            probes.append(learner.probe([1, 2, 3, 4]))
    with connect(learners[1], model_directory) as learner:
        resume(learner, directory / "p3")
        probes.append(learner.probe([1, 2, 3, 4]))
    assert probes[1:] == [pytest.approx(probes[0], abs=1e-5)] * 2


@pytest.mark.nightly
def test_two_ranks_train_the_adapter_that_one_does(model_directory, learners, tmp_path):
    found, probes = {}, {}
    for processes, address in learners.items():
        directory = tmp_path / str(processes)
        with connect(address, model_directory, processes, lora={"rank": 3, "alpha": 6}) as learner:
            found[processes] = [train(learner, step, directory, True)[0] for step in range(2)]
            probes[processes] = learner.probe([1, 2, 3, 4])
            # What two ranks need is what one has written, and the other way round.
            resume(learner, tmp_path / "1" / "p1", base=str(model_directory))
            if processes == 1:
                again, _ = train(learner, 1, tmp_path / "again")
                assert again["weights_sha256"] == found[1][1]["weights_sha256"]
            else:
                train(learner, 1, tmp_path / "handed over")
                assert learner.probe([1, 2, 3, 4]) == pytest.approx(probes[1], abs=1e-5)
    assert probes[2] == pytest.approx(probes[1], abs=1e-5)
    for one, two in zip(found[1], found[2], strict=True):
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


@pytest.mark.fault(
    "services", "all processes of the learner's first node are killed", "the second node joins the next learner"
)
def test_two_nodes_train_as_two_processes_of_one_and_a_node_joins_the_next_learner(model_directory, learners, tmp_path):
    with connect(learners[2], model_directory, 2) as learner:
        expected, _ = train(learner, 0, tmp_path / "one node")
    settings = {"nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}"}
    overrides = [f"learner.{name}={value}" for name, value in settings.items()]
    argv = [sys.executable, "-m", "flows.cli", "join", "sft_demo", *overrides, "--node", "1"]
    node = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        for generation in ("first", "second"):
            with process(tmp_path / generation, **settings) as (child, report):
                with connect(report["address"], model_directory, **settings) as learner:
                    assert learner.state()["processes"] == 2
                    assert listens_at(psutil.Process(child.pid)) == {"127.0.0.1"}
                    found, _ = train(learner, 0, tmp_path / generation)
                assert found["weights_sha256"] == expected["weights_sha256"]
                assert psutil.Process(node.pid).children(recursive=True)
            happened("killed")
            until(lambda: not psutil.Process(node.pid).children(recursive=True), lambda: "its processes are there")
    finally:
        node.terminate()
        said, _ = node.communicate(timeout=PATIENCE)
    assert said.count("joins it") >= 2 and said.count("waits for a learner") >= 2


@pytest.mark.nightly
@pytest.mark.fault("services", "`join` is killed", "none of its processes is left, LearnerLost on the first node")
def test_a_killed_join_takes_its_processes_along_and_the_learner_says_that_it_is_lost(model_directory, tmp_path):
    settings = {"nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}"}
    overrides = [f"learner.{name}={value}" for name, value in settings.items()]
    argv = [sys.executable, "-m", "flows.cli", "join", "sft_demo", *overrides, "--node", "1"]
    with subprocess.Popen(argv) as node, process(tmp_path, **settings) as (child, report):
        try:
            learner = connect(report["address"], model_directory, **settings)
            joined = psutil.Process(node.pid).children(recursive=True)
        finally:
            node.kill()
        happened(f"SIGKILL to {node.pid} with {len(joined)} processes")
        with pytest.raises(LearnerLost):
            train(learner, 0, tmp_path)
        assert child.wait(PATIENCE) != 0
        until(lambda: not any(each.is_running() for each in joined), lambda: f"left: {joined}")


def listens_at(*processes):
    """Return the addresses at which processes listen."""
    found = [each for process in processes for each in process.net_connections("tcp")]
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


def test_of_one_machine_no_process_listens_to_others(tmp_path):
    with process(tmp_path, processes=2) as (child, _):
        agent, ranks = psutil.Process(child.pid), ranks_of(child)
        assert len(ranks) == 2 and listens_at(agent)
        assert listens_at(agent, *ranks) == {"127.0.0.1"}


def ranks_of(child):
    """Return the processes of a learner's ranks, children of its agent."""
    return [each for each in psutil.Process(child.pid).children() if "tasks.learner.worker" in each.cmdline()]


LOSSES = {
    "ipo": IpoLoss(threshold=0.001),
    "ppo": PpoLoss(tis=TruncatedImportance(level="sequence", cap=1.1)),
    "cispo": CispoLoss(clip_high=0.5),
    "gspo": GspoLoss(clip_low=0.3, clip_high=0.3, sequence_mask=SequenceMask(low=0.2, high=3.0)),
    "custom": CustomLoss(function="tests.tasks.learner.own_losses:reinforce", arguments={"scale": 0.5}),
}


def updates(address, directory, model_directory, processes):
    """Return the update that each loss makes of the same batch from the same policy, and its statistics."""
    found = {}
    for name, loss in LOSSES.items():
        with connect(address, model_directory, processes, loss=loss) as learner:
            found[name] = train(learner, 0, directory / name)
    return found


def test_two_ranks_equal_one_with_every_loss(model_directory, learners, tmp_path):
    one, two = (
        updates(at, tmp_path / str(processes), model_directory, processes) for processes, at in learners.items()
    )
    for name in LOSSES:
        (mine, my_statistics), (other, other_statistics) = one[name], two[name]
        columns = ("loss", "grad_norm", "mismatch_kl", "entropy", "masked_fraction")
        assert [other[key] for key in columns] == pytest.approx([mine[key] for key in columns], rel=1e-6, abs=1e-9)
        nulls = {key for key, value in mine["metrics"].items() if value is None}
        assert nulls == {key for key, value in other["metrics"].items() if value is None}
        assert mine["metrics"]["attention"] == other["metrics"]["attention"]
        known = mine["metrics"].keys() - nulls - {"attention", "processes", "threads", *speed.NAMES}
        same = {key: mine["metrics"][key] for key in known}
        assert {key: other["metrics"][key] for key in known} == pytest.approx(same, rel=1e-5, abs=1e-9)
        assert other_statistics["masked"] == my_statistics["masked"]
    assert len({update["grad_norm"] for update, _ in one.values()}) == len(LOSSES)
    assert sum(update["masked_fraction"] for update, _ in one.values()) > 0


@pytest.mark.fault(
    "services", "the learner is killed within a request", "LearnerLost with the request's name, no policy"
)
def test_kill_in_the_middle_is_a_lost_learner(model_directory, tmp_path):
    with process(tmp_path) as (child, report):
        learner = connect(report["address"], model_directory)
        # Stopped, it cannot answer: the kill hits a request that is under way.
        os.kill(child.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(train, learner, 0, tmp_path)
            os.kill(child.pid, signal.SIGKILL)
            with pytest.raises(LearnerLost, match="during 'train'"):
                asking.result(PATIENCE)
        assert child.wait(PATIENCE) == -signal.SIGKILL
        happened("status -9")
        assert not (tmp_path / "p1").exists()
        with pytest.raises(LearnerLost, match="no learner answers"):
            Learner(report["address"])


@pytest.mark.nightly
@pytest.mark.fault("services", "the learner gets no more memory", "an error of that request, then it trains")
def test_a_learner_that_gets_no_memory_says_so_and_trains_once_it_has_some(model_directory, tmp_path):
    with process(tmp_path) as (child, report), connect(report["address"], model_directory) as learner:
        limits = psutil.Process(child.pid).rlimit
        before = limits(psutil.RLIMIT_DATA)
        limits(psutil.RLIMIT_DATA, (1, before[1]))
        with pytest.raises(LearnerError, match=r"malloc|allocate") as refused:
            train(learner, 0, tmp_path / "short")
        happened(refused.value)
        limits(psutil.RLIMIT_DATA, before)
        load_first(learner, model_directory)
        assert train(learner, 0, tmp_path / "enough")


@pytest.mark.fault("services", "one of two ranks is killed", "LearnerLost, and all ranks end")
def test_kill_of_one_rank_ends_all(model_directory, tmp_path):
    with process(tmp_path, processes=2) as (child, report):
        learner = connect(report["address"], model_directory, processes=2)
        ranks = ranks_of(child)
        assert len(ranks) == 2
        (other,) = [each for each in ranks if each.pid != learner.state()["pid"]]
        other.kill()
        happened(f"SIGKILL to rank {other.pid}")
        with pytest.raises(LearnerLost):
            train(learner, 0, tmp_path)
        assert child.wait(PATIENCE) != 0
        assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in ranks)


def test_several_clients_and_errors_in_one_life(model_directory, tmp_path):
    with process(tmp_path) as (_, report), connect(report["address"], model_directory) as first:
        with Learner(report["address"]) as second:
            assert second.state() == first.state()
            assert second.probe([1, 2, 3]) == first.probe([1, 2, 3])
            with pytest.raises(LearnerError, match="nowhere is not a model directory"):
                second.load("p9", str(tmp_path / "nowhere"), fresh_optimizer=True)
        with Learner(report["address"]) as garbled:
            garbled._socket.sendall(b"\xff" * 4 + b"\x00" * 8)
        assert first.state()["policy_key"] is None
        with pytest.raises(LearnerError, match="holds none"):
            first.probe([1, 2])
        with pytest.raises(LearnerError, match="unknown request"):
            first._ask("dance")
        with pytest.raises(LearnerError, match="its log has the traceback"):
            first.configure({"no_such_key": 1}, {})
        assert "no_such_key" in (tmp_path / "log").read_text()
        configure(first, learning_rate=1e-2)
        load_first(first, model_directory)
        update, _ = train(first, 0, tmp_path)
        assert first.state()["weights_sha256"] == update["weights_sha256"]


def test_a_disk_that_fails_costs_the_memory_not_the_process(model_directory, tmp_path):
    with process(tmp_path) as (_, report), connect(report["address"], model_directory) as learner:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(LearnerError, match="NotADirectoryError"):
            train(learner, 0, tmp_path / "file")
        assert learner.state()["policy_key"] is None
        load_first(learner, model_directory)
        assert train(learner, 0, tmp_path)[0]["version"] == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_it_ends_when_its_input_closes(tmp_path, processes):
    with process(tmp_path, processes) as (child, _):
        family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        child.stdin.close()
        child.wait(PATIENCE)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE)
        assert not alive


def test_with_a_key_it_binds_what_it_is_told_and_a_silent_stranger_keeps_nobody_waiting(tmp_path, monkeypatch):
    monkeypatch.setenv(BIND, "127.0.0.2")
    monkeypatch.setenv(protocol.KEY_VARIABLE, "k")
    with process(tmp_path) as (child, report):
        assert {report[name].partition(":")[0] for name in ("address", "pulse")} == {"127.0.0.2"}
        host, _, port = report["address"].partition(":")
        with socket.create_connection((host, int(port))), Learner(report["address"], "k") as learner:
            assert learner.state()["pid"] == child.pid
        with pytest.raises(LearnerLost, match="another key"):
            Learner(report["address"], "j")
        assert pulse.ask(report["pulse"], PATIENCE, "k")["request"] == ""


def test_it_ends_on_sigterm_and_lives_on_without_input(tmp_path):
    with process(tmp_path, stdin=subprocess.DEVNULL) as (child, report):
        with Learner(report["address"]) as learner:
            assert learner.state()["pid"] == child.pid
        child.terminate()
        assert child.wait(PATIENCE) == -signal.SIGTERM

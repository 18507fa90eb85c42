"""Real runs whose engine, environment server and learner are flow runs on pools; they are killed, and so is a run."""

import json
import os
import signal
import socket
import sys
from functools import partial

import pytest

from configs.load import load
from flows.services.ownership import marked_processes
from flows.services.pools import ADDRESS, PULSE, TOKEN, shared_key, stand_in
from storage.store import open_store
from tasks.learner import pulse
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.driving import check_once, rows, without_ambient
from tests.fixtures.faults import happened
from tests.fixtures.histories import results
from tests.fixtures.s3_host import S3Host
from tests.fixtures.serving import PREFECT, ROOT, Serving
from tests.fixtures.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
SMALL = str(ROOT / "tests/acceptance/small.toml")
ON_POOLS = "placement.services=pools"
SHORT_LEASE = "placement.lease_seconds=20"
"""Where a service is to end by it. A busy SQLite may refuse for longer what renews a lease."""
LOST = {"engine": "engine: ended", "environment": "environment reverse_text: ended"}


@pytest.fixture(scope="module")
def bucket():
    """An S3 server, which the machines of all pools know."""
    host = S3Host()
    yield host
    host.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory, bucket):
    """A server, and a worker for each pool of services, as if on machines of their own."""
    place = tmp_path_factory.mktemp("pools")
    tiny_qwen3(place / "model", seed=3)
    found = Serving(place)
    found.environment |= {TOKEN: "the token of these machines", "PREFECT_WORKER_QUERY_SECONDS": "5"}
    found.environment |= bucket.environment
    try:
        found.server()
        done = found.stagecoach("deploy", "--store", str(found.store), "--slots", "2")
        assert done.returncode == 0, done.stdout + done.stderr
        for pool in ("engines", "environments", "train"):
            worker(found, pool)
        yield found
    finally:
        found.close()


def worker(served, pool):
    """Start a worker, as on a machine of its own; one that trains has room for one node of a learner."""
    limit = ("--limit", "1") if pool == "train" else ()
    return served.begin(PREFECT, "worker", "start", "--pool", pool, *limit)


def sent(served, *words):
    """Begin a command of the checkout."""
    return served.begin(sys.executable, "-m", "flows.cli", *words)


def until_ended(served, process):
    """Wait until a run has ended well."""
    until(lambda: process.poll() is not None, served.log)
    assert process.returncode == 0, served.log()


def until_in_run(served, process, holds):
    """Wait until something holds, which it must before the run has ended."""
    until(lambda: process.poll() is not None or holds(), served.log)
    assert process.poll() is None, served.log()


def until_none_left(served, run, process):
    """Wait until nothing of a run's services is alive."""
    left = partial(services_left, served, run, process.pid)
    until(lambda: not left(), lambda: str(left()))


@pytest.fixture
def service(served, monkeypatch):
    """Start the environment's service of a run as the run does; return that process, its flow run and its place."""
    monkeypatch.setenv(TOKEN, served.environment[TOKEN])

    def begin(run, *others):
        config = load(["demo"], [*settings(served, *others), f"name={run}"])
        report = served.place / f"{run}.json"
        process = served.begin(*stand_in(config, "environment", "reverse_text", "", report))
        until(report.exists, served.log)
        (flow_run,) = flow_runs(served, run, "environment")
        host, _, port = flow_run["labels"][ADDRESS].removeprefix("tcp://").rpartition(":")
        return process, flow_run["id"], (host, int(port))

    return begin


def settings(served, *others):
    return [f"model.path={served.place / 'model'}", f"store={served.store}", ON_POOLS, *others]


def flow_runs(served, run, service):
    """The flow runs that served a run, the first one first."""
    asked = {"name": {"like_": f"{service}-{run}-"}}
    return list(served.ask("/flow_runs/filter", flow_runs=asked, sort="START_TIME_ASC"))


def states(served, run, service):
    return [each["state_type"] for each in flow_runs(served, run, service)]


def until_replaced(served, run, service):
    """Wait until the first flow run is known as lost and the second has been given back, or its lease has lapsed.

    A Prefect whose SQLite is busy may refuse for longer than a process at its end has.
    """
    ended = partial(states, served, run, service)
    given_back = ["CRASHED", "CANCELLED"], ["CRASHED", "COMPLETED"]
    until(lambda: ended() in given_back, lambda: f"{service}: {ended()}\n{served.log()}")


def kill(flow_run):
    """Kill the process of a flow run, by the number that its worker has noted."""
    process = int(flow_run["infrastructure_pid"].rpartition(":")[2])
    os.kill(process, signal.SIGKILL)
    happened(f"SIGKILL to {process} of {flow_run['name']}")


def services_left(served, run, process):
    """What is alive of the services that a run, or one of the flow runs that served it, has started."""
    every = [each for kind in ("engine", "environment", "learner") for each in flow_runs(served, run, kind)]
    owners = {str(process), *(each["infrastructure_pid"].rpartition(":")[2] for each in every)}
    return [name for _, owner, name in marked_processes() if owner.partition(":")[0] in owners]


def supervised(served, run, store, *others):
    """Begin supervised training of a few seconds a step, which needs a learner and nothing else."""
    data = served.place / "rows.jsonl"
    those = [{"prompt": f"say {number}", "completion": str(number) * 30} for number in range(200)]
    data.write_text("".join(f"{json.dumps(each)}\n" for each in those))
    small = [f"data.path={data}", "seed=7", "steps=3", "assignment.groups_per_step=100", "packing.tokens_per_row=256"]
    small += ["packing.updates_per_step=4", f"model.path={served.place / 'model'}", f"store={store}", *others]
    return sent(served, "sft", "sft_demo", *small, "--name", run)


def until_it_trains(served, run, process):
    """Wait until a step after the first is under way in the learner of a run."""
    key = shared_key(load(["sft_demo"], [f"store={served.store}", f"name={run}", ON_POOLS]), "learner")
    done = lambda: results(open_store(served.store), "training", run)  # noqa: E731
    until_in_run(served, process, done)
    # One of two labels that are written at the same moment may be lost, and is written again.
    found = []
    read = lambda: [each["labels"][PULSE] for each in flow_runs(served, run, "learner") if each["labels"].get(PULSE)]  # noqa: E731
    until(lambda: found.extend(read()) or found, served.log)
    address = found[0]
    until(lambda: pulse.ask(address, 30.0, key)["request"] == "train", served.log, every=0.02)


@pytest.mark.nightly
@pytest.mark.fault(
    "services",
    "the flow run of the learner is killed while it trains",
    "the step is trained again by another one, and all rows and weights are those of an undisturbed run",
)
def test_steps_with_a_learner_that_is_killed(served, monkeypatch):
    monkeypatch.setenv(TOKEN, served.environment[TOKEN])
    undisturbed = supervised(served, "trained", served.place / "undisturbed")
    process = supervised(served, "trained", served.store, ON_POOLS)
    until_it_trains(served, "trained", process)
    kill(flow_runs(served, "trained", "learner")[0])
    assert_as_undisturbed(served, "trained", process, undisturbed)
    until_replaced(served, "trained", "learner")


def assert_as_undisturbed(served, run, process, undisturbed):
    until(lambda: process.poll() is not None and undisturbed.poll() is not None, served.log)
    assert (process.returncode, undisturbed.returncode) == (0, 0), served.log()
    store = open_store(served.store)
    losses = [each.message for each in store.runs.lost_services(run)]
    assert len(losses) == 1 and losses[0].startswith("learner: ended with status 1; restart 1")
    check_once(served.store, run)
    found = [without_ambient(rows(each, run)) for each in (store, open_store(served.place / "undisturbed"))]
    assert len(found[0]["policies"]) == 4 and found[0] == found[1]
    until_none_left(served, run, process)


@pytest.mark.nightly
@pytest.mark.fault(
    "services",
    "the flow run of the learner's second node is killed while it trains",
    "the first node ends too, and two others train the step again",
)
def test_steps_with_a_learner_of_two_nodes_of_which_one_is_killed(served, monkeypatch):
    monkeypatch.setenv(TOKEN, served.environment[TOKEN])
    worker(served, "train")
    # Of another seed: work is found again whatever trained it.
    undisturbed = supervised(served, "of-two", served.place / "undisturbed", "seed=8", "learner.processes=2")
    process = supervised(served, "of-two", served.store, "seed=8", ON_POOLS, "learner.nodes=2")
    until_it_trains(served, "of-two", process)
    nodes = partial(flow_runs, served, "of-two", "learner")
    kill(next(each for each in nodes() if each["name"].endswith("-2")))
    assert_as_undisturbed(served, "of-two", process, undisturbed)
    ended = lambda: sorted((each["name"], each["state_type"]) for each in nodes())  # noqa: E731
    expected = [("learner-of-two-1", "CANCELLED"), ("learner-of-two-1", "FAILED")]
    expected += [("learner-of-two-2", "CANCELLED"), ("learner-of-two-2", "CRASHED")]
    until(lambda: ended() == expected, lambda: f"{ended()}\n{served.log()}")


@pytest.mark.fault("services", "a flow run that serves is killed", "its groups are sampled again, by another one")
@pytest.mark.parametrize(
    ("run", "killed"),
    [("one-lost", ["engine"]), pytest.param("two-lost", ["engine", "environment"], marks=pytest.mark.nightly)],
    ids=["the engine", "both"],
)
def test_two_steps_with_services_that_are_killed(served, run, killed):
    place = served.place / run  # of its own, where nothing of another run is found
    asked = [*settings(served, "steps=2", f"store={place}"), "--name", run]
    process = sent(served, "run", "demo", SMALL, *asked)

    def num_parts():
        if not (place / "format.json").exists():
            return 0
        entries = results(open_store(place), "rollout", run)
        return len([entry for entry in entries if entry.part])

    for service in killed:
        before = num_parts()
        until_in_run(served, process, lambda before=before: num_parts() > before)
        kill(flow_runs(served, run, service)[0])
    until_ended(served, process)

    store = open_store(place)
    assert {entry.step for entry in results(store, "training", run)} == {0, 1}
    check_once(place, run)
    assert len(rows(store, run)["traces"]) == 2 * 6 * 4
    losses = [each.message.split(" with")[0] for each in store.runs.lost_services(run)]
    # In any order: on a busy machine the second is noticed before the first.
    assert sorted(losses) == sorted(LOST[service] for service in killed)
    for service in killed:
        until_replaced(served, run, service)
    until_none_left(served, run, process)


@pytest.mark.nightly
def test_a_store_in_s3_has_its_weights_where_pools_are_of_this_machine(served, bucket, monkeypatch):
    place = bucket.new_place()
    asked = [*settings(served, "steps=2", f"store={place}"), "--name", "in-s3"]
    process = sent(served, "run", "demo", SMALL, *asked)
    until_ended(served, process)
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    store = open_store(place)
    trained = results(store, "training", "in-s3")
    assert [store.policies.find(each.key) is not None for each in trained] == [True, True]
    services = ("engine", "environment", "learner")
    assert all(flow_runs(served, "in-s3", each) for each in services), "they were flow runs"


@pytest.mark.nightly
def test_a_killed_run_gives_its_services_back(served):
    """Its stand-ins live a moment longer, are told by their guardians, and cancel the flow runs.

    Before that one of two servers of its environment is killed, and another takes its place.
    """
    asked = settings(served, "steps=50", "environments.0.servers=2")
    process = sent(served, "run", "demo", SMALL, *asked, "--name", "killed")
    every = lambda: flow_runs(served, "killed", "engine") + flow_runs(served, "killed", "environment")  # noqa: E731

    def begun(count):
        """Tell whether so many of the run's services have begun; they sweep away what a killed run has left."""
        return sum(bool(each["labels"].get(ADDRESS)) for each in every()) == count

    until_in_run(served, process, lambda: begun(3))
    reported = partial(served.store.glob, "logs/killed/reports/*/environment-reverse_text-2.json")
    until_in_run(served, process, lambda: any(reported()))

    def last_step():
        entries = results(open_store(served.store), "rollout", "killed")
        return max((entry.step for entry in entries), default=-1)

    # A step that begins later has seen that it answers: what ends before that is not asked for again.
    before = last_step()
    until_in_run(served, process, lambda: last_step() > before + 1)
    (second,) = (each for each in flow_runs(served, "killed", "environment") if each["name"].endswith("-2"))
    kill(second)
    until_in_run(served, process, lambda: begun(4))
    os.kill(process.pid, signal.SIGKILL)
    happened(f"SIGKILL to {process.pid}, the run")
    until(lambda: sorted(each["state_type"] for each in every()) == ["CANCELLED"] * 3 + ["CRASHED"], served.log)
    losses = [each.message for each in open_store(served.store).runs.lost_services("killed")]
    assert len(losses) == 1 and losses[0].startswith("environment reverse_text-2: ended")
    until_none_left(served, "killed", process)


@pytest.mark.nightly
def test_a_service_whose_run_is_gone_without_a_word_ends_by_itself(served, service):
    process, flow_run, place = service("gone", SHORT_LEASE)
    socket.create_connection(place, timeout=10).close()
    process.kill()
    happened(f"SIGKILL to {process.pid}, which renewed the lease")
    assert served.ended(flow_run)[0] == "COMPLETED"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place, timeout=10)


@pytest.mark.nightly
def test_a_service_that_is_given_back_ends_without_its_worker(served, service):
    """Its worker hears of it by one event, which may be lost, and never asks."""
    process, flow_run, place = service("given-back")
    next(each for each in served.processes if "environments" in list(each.args) and each.poll() is None).kill()
    happened("SIGKILL to the worker of the pool environments")
    process.terminate()
    assert served.ended(flow_run)[0] == "CANCELLED"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place, timeout=10)
    worker(served, "environments")


def test_another_token_starts_nothing(served, monkeypatch, tmp_path):
    monkeypatch.setenv(TOKEN, "a guess")
    config = load(["demo"], [*settings(served), "name=guessed"])
    process = served.begin(*stand_in(config, "environment", "reverse_text", "", tmp_path / "report.json"))
    until(lambda: process.poll() is not None, served.log)
    (flow_run,) = flow_runs(served, "guessed", "environment")
    state, message = served.state(flow_run["id"])
    assert state == "FAILED" and f"not made with the {TOKEN} of this machine" in message

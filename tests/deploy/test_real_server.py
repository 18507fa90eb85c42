"""A real Prefect server, a worker and `stagecoach deploy`: refused, made, scheduled, cancelled, retried, killed."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flows.services.ownership import owned_processes, start_time
from storage.store import open_store
from tests.fixtures.faults import happened
from tests.fixtures.serving import serving
from tests.fixtures.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
FLOWS = {
    "train": ("demo", "train", "continue"),
    **{name: (name,) for name in ("sft", "dpo", "evaluate", "replay", "maintain")},
    "serve": ("engine", "environment", "learner"),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served")) as found:
        yield found


def sft(served, **parameters):
    """Start supervised training of the tiny model; return the flow run's id."""
    return served.start_run("sft/sft", **served.of_the_tiny_model(**parameters))


def store(served):
    return open_store(served.store)


def events(served, run):
    return [(event.event, event.flow_run) for event in store(served).runs.events(run)]


def trained(served, run):
    """The finished trainings of a run: step to the attempt that did it."""
    return {entry.step: entry.attempt for entry in store(served).ledger.entries(run=run, stage="training")}


def logs(served, flow_run):
    of_run = {"flow_run_id": {"any_": [flow_run]}}
    return [line["message"] for line in served.ask("/logs/filter", logs=of_run, sort="TIMESTAMP_DESC", limit=200)]


def tags(served, flow_run):
    return dict(tag.split(":", 1) for tag in served.ask(f"/flow_runs/{flow_run}")["tags"] if ":" in tag)


def test_deploying_again_changes_nothing(served):
    before = served.ask("/deployments/filter", limit=50)
    done = served.stagecoach("deploy", "--store", str(served.store))
    assert done.returncode == 0
    assert "work pool stagecoach\n" in done.stdout
    after = served.ask("/deployments/filter", limit=50)
    assert {each["id"] for each in before} == {each["id"] for each in after}
    flows = {each["id"]: each["name"] for each in served.ask("/flows/filter", limit=50)}
    deployed = {(flows[each["flow_id"]], each["name"]) for each in after}
    assert deployed == {(flow, name) for flow, names in FLOWS.items() for name in names}
    active = {each["name"]: [schedule["active"] for schedule in each["schedules"]] for each in after}
    assert active | {"train": [False], "evaluate": [True], "maintain": [True]} == active
    names = [each["name"] for each in served.ask("/automations/filter", limit=50)]
    assert sum("mark lost runs" in name for name in names) == 1


def test_a_wrong_setting_fails_the_run_with_the_configs_own_message(served):
    flow_run = sft(served, name="wrong", overrides=["training.lerning_rate=1"])
    state, message = served.ended(flow_run)
    assert state == "FAILED"
    assert "The config has a problem; nothing was started." in message
    assert "training.lerning_rate" in message and "learning_rate" in message.replace("lerning_rate", "")
    assert "wrong" not in store(served).runs.names()


def test_a_run_of_two_steps_links_to_its_run_and_back(served):
    flow_run = sft(served, steps=2)
    assert served.ended(flow_run)[0] == "COMPLETED"
    linked = tags(served, flow_run)
    assert linked["store"] == str(served.store)
    assert re.fullmatch(r"sft-[0-9]{8}-[0-9]{4}-[0-9a-f]{8}", linked["run"])
    assert events(served, linked["run"]) == [("started", flow_run), ("finished", flow_run)]
    assert sorted(trained(served, linked["run"])) == [0, 1]
    artifacts = served.ask("/artifacts/filter", artifacts={"flow_run_id": {"any_": [flow_run]}})
    assert {"markdown", "progress"} <= {each["type"] for each in artifacts}
    message = served.state(flow_run)[1]
    assert message.startswith("2 steps, loss ") and message.endswith(" cached")
    outcome = served.result(flow_run)
    assert (outcome["run"], [step["step"] for step in outcome["steps"]]) == (linked["run"], [0, 1])


NOTIFY = """
import sys
from prefect.automations import Automation, EventTrigger
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.events.actions import SendNotification
told = {"subject": "{{subject}}", "body": "{{body}}"}
block = CustomWebhookNotificationBlock(name="ops", url=sys.argv[1], json_data=told).save("ops", overwrite=True)
send = SendNotification(block_document_id=block, subject="{{ event.event }}", body="{{ event.payload.message }}")
trigger = EventTrigger(expect={"stagecoach.run.finished"}, posture="Reactive", threshold=1)
Automation(name="notify", trigger=trigger, actions=[send]).create()
"""


@pytest.fixture
def webhook():
    """An address and what was posted there."""
    posted = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}/", posted
        listener.shutdown()


@pytest.mark.nightly
def test_a_notification_block_is_told_of_the_end_of_a_run(served, webhook):
    url, posted = webhook
    done = subprocess.run([sys.executable, "-c", NOTIFY, url], env=served.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    flow_run = sft(served, name="told", steps=1)
    assert served.ended(flow_run)[0] == "COMPLETED"
    told = {"subject": "stagecoach.run.finished"}
    until(lambda: any(each.items() >= told.items() for each in posted), lambda: f"{posted}\n{served.log()}")
    assert posted[-1]["body"].startswith("run told finished: ")


@pytest.mark.nightly
def test_a_schedule_fires(served):
    """Of the evaluation, which finds no policy in an empty store, says so and is content."""
    deployment = served.ask("/deployments/name/evaluate/evaluate")
    empty = str(served.place / "empty")
    soon = (datetime.now(UTC) + timedelta(seconds=20)).isoformat()
    clock = {"interval": 3600, "anchor_date": soon}
    wanted = {"active": True, "slug": "soon", "schedule": clock, "parameters": {"advanced": {"store": empty}}}
    served.ask(f"/deployments/{deployment['id']}/schedules", wanted)
    fired = []

    def has_fired():
        runs = served.ask("/flow_runs/filter", deployments={"id": {"any_": [deployment["id"]]}}, limit=50)
        fired[:] = [run for run in runs if run["auto_scheduled"] and run["state_type"] == "COMPLETED"]
        return bool(fired)

    until(has_fired, served.log)
    assert "nothing to evaluate" in fired[0]["state"]["message"]
    assert fired[0]["parameters"]["advanced"] == {"store": empty}


@pytest.mark.fault(
    "process",
    "a deployed run is cancelled, retried, killed, and killed with its worker",
    "it goes on where it stopped, events and states are true",
)
@pytest.mark.nightly
def test_cancelled_retried_and_killed_it_goes_on_where_it_stopped(served):
    flow_run = sft(served, steps=4000)

    def until_last(event):
        until(lambda: events(served, run)[-1] == (event, flow_run), served.log)

    def retry():
        assert served.prefect("flow-run", "retry", flow_run).returncode == 0

    until(lambda: "run" in tags(served, flow_run), served.log)
    run = tags(served, flow_run)["run"]
    until(lambda: run in store(served).runs.names() and len(trained(served, run)) > 1, served.log)
    owner = served.owner(flow_run)
    assert owned_processes(owner)
    assert served.prefect("flow-run", "cancel", flow_run).returncode == 0
    assert served.ended(flow_run, "CANCELLED")[0] == "CANCELLED"
    # A process that takes longer than its worker waits is killed by it, and it is gone and noted a little later.
    until(lambda: owned_processes(owner) == [] and events(served, run)[-1][0] == "cancelled", served.log)
    assert events(served, run) == [("started", flow_run), ("cancelled", flow_run)]
    happened(f"cancelled, then SIGKILL to process {owner}")
    told = store(served).runs.events(run)[1].message
    again = f"safe in {served.store}; go on with: stagecoach resume {run} --store {served.store}"
    assert re.match("cancelled in Prefect at [a-z]+ of step [0-9]+", told) and told.endswith(again)
    until(lambda: told in logs(served, flow_run), served.log)
    before = trained(served, run)

    served.settled(flow_run)
    retry()
    until(lambda: len(trained(served, run)) > len(before) + 1, served.log)
    assert trained(served, run).items() > before.items()  # what was done is not done again
    assert events(served, run)[2:] == [("resumed", flow_run)]

    os.kill(_process(served, flow_run), signal.SIGKILL)
    assert served.ended(flow_run, "CRASHED")[0] == "CRASHED"
    until_last("crashed")  # noted by the worker's hook

    retry()
    until_last("resumed")
    process, worker = _process(served, flow_run), served.processes[-1]
    os.kill(worker.pid, signal.SIGKILL)
    os.kill(process, signal.SIGKILL)
    until(lambda: start_time(process) is None, served.log)
    served.stagecoach("deploy", "--store", str(served.store))
    assert served.state(flow_run) == ("CRASHED", "The process of this run is gone.")
    assert events(served, run)[-1] == ("crashed", flow_run)


@pytest.mark.nightly
@pytest.mark.fault("process", "a run that holds the GPU slot is killed", "the next run has it, and never both at once")
def test_two_runs_never_share_a_gpu_slot(served):
    first = sft(served, name="first", steps=4000)
    until(lambda: "first" in store(served).runs.names() and trained(served, "first"), served.log)
    given_up, second = sft(served, name="given-up"), sft(served, name="second", steps=2)
    before = len(trained(served, "first"))
    until(lambda: len(trained(served, "first")) > before + 20, served.log)
    # The queue of their deployment has room for as many processes as slots: they are not started.
    assert {served.state(flow_run)[0] for flow_run in (given_up, second)} == {"SCHEDULED"}
    assert served.prefect("flow-run", "cancel", given_up).returncode == 0
    assert served.ended(given_up)[0] == "CANCELLED"
    assert not trained(served, "given-up") and not trained(served, "second")

    process = _process(served, first)
    os.kill(process, signal.SIGKILL)
    happened(f"SIGKILL to process {process}")
    assert served.ended(first)[0] == "CRASHED"
    assert served.ended(second)[0] == "COMPLETED"
    end = max(entry.finished_at for entry in store(served).ledger.entries(run="first"))
    of_second = store(served).ledger.entries(run="second", stage="training")
    assert len(of_second) == 2 and end < min(entry.started_at for entry in of_second)


def _process(served, flow_run):
    return int(served.owner(flow_run).partition(":")[0])

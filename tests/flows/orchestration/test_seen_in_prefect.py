"""A small supervised run through the real learner, store and Prefect: what is seen of it, cancelled and finished."""

import json
import subprocess
import sys

import pytest

from storage.store import open_store
from tests.fixtures.programs import PROGRAMS, ask, environment
from tests.fixtures.serving import tiny_sources
from tests.fixtures.waiting import PATIENCE, until

pytestmark = pytest.mark.engine
PROGRAM = PROGRAMS / "small_sft.py"
SECRET = "sk-2f6d1c0ab95e4477"
STAGES = ("assignment", "demonstration", "filtering", "advantage", "packing", "training", "metrics")


class Seen:
    """What the run said, where its store is, and how to ask its Prefect server."""

    def __init__(self, process, store):
        self.process, self.root = process, store
        self.said = {}
        self.printed = []

    def listen(self):
        """Read until the run is over."""
        while "url" not in self.said:
            line = self.process.stdout.readline()
            assert line, f"the run ended early: {''.join(self.printed)}"
            self.printed.append(line)
            if line.startswith("SAID "):
                self.said |= json.loads(line.removeprefix("SAID "))

    def ask(self, path, **body):
        """Ask Prefect."""
        return ask(self.said["url"], path, body)

    def runs(self):
        """The flow runs, the first one first."""
        return list(self.ask("/flow_runs/filter", sort="START_TIME_ASC"))

    def check_tasks(self, run, expected):
        """Wait until the names of a flow run's task runs are those: runs and their names are recorded later."""

        def names():
            return {task["name"] for task in self.ask("/task_runs/filter", flow_runs={"id": {"any_": [run]}})}

        until(lambda: names() == expected, lambda: f"{names()}")

    @property
    def store(self):
        return open_store(self.root)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """One run for all tests: cancelled after its first step, then called again."""
    place = tmp_path_factory.mktemp("small")
    tiny_sources(place)
    with (place / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *(str(place / name) for name in ("store", "model", "rows.jsonl"))],
            env=environment("STAGECOACH_") | {"STAGECOACH_ENGINE_KEY": SECRET},
            cwd=place,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    run = Seen(process, place / "store")
    try:
        run.listen()
        yield run
    finally:
        run.printed.append(process.communicate("\n", timeout=PATIENCE)[0])
        print((place / "errors").read_text())
    assert process.returncode == 0


def test_a_cancelled_run_ends_between_two_stages_and_goes_on_from_there(seen):
    said = seen.said["cancelled"]
    assert said.startswith("cancelled before stage assignment of step 1")
    assert f"safe in {seen.root}; go on with: stagecoach resume small --store {seen.root}" in said
    first, second = seen.runs()
    assert (first["state_type"], second["state_type"]) == ("CANCELLED", "COMPLETED")
    events = seen.store.runs.events("small")
    assert [event.event for event in events] == ["started", "cancelled", "resumed", "finished"]
    assert events[1].message == said
    assert [event.flow_run for event in events] == [first["id"], first["id"], second["id"], second["id"]]
    outcome = seen.said["outcome"]
    assert (outcome["num_found"], outcome["num_computed"]) == (2 + len(STAGES), len(STAGES))
    assert [step["computed"] for step in outcome["steps"]] == [False, True]


def test_task_runs_are_named_after_stage_and_step(seen):
    first, second = seen.runs()
    before = {f"{stage}-0" for stage in ("examples", "policy_import", *STAGES)}
    seen.check_tasks(first["id"], before)
    # What the first flow run had done is seen in the second, too: as cached.
    seen.check_tasks(second["id"], before | {f"{stage}-1" for stage in STAGES})


def test_nobody_waits_for_heartbeats_of_a_run_with_its_own_server(seen):
    def names():
        return {each["event"] for each in seen.ask("/events/filter", limit=50)["events"]}

    until(lambda: "prefect.flow-run.Completed" in names(), lambda: f"{names()}")
    assert "prefect.flow-run.heartbeat" not in names()


def test_secrets_are_nowhere(seen):
    told = json.dumps([seen.ask("/logs/filter"), seen.runs(), seen.ask("/artifacts/filter")]) + "".join(seen.printed)
    files = [path for path in seen.root.parent.rglob("*") if path.is_file()]
    texts = {str(path): path.read_bytes() for path in files}
    assert "small" in told
    assert any(b"learner" in text for name, text in texts.items() if name.endswith(".log"))  # the search does search
    assert SECRET not in told
    assert [name for name, text in texts.items() if SECRET.encode() in text] == []

"""Real sweeps by the command line: forks of a recorded step side by side, killed and begun again; a loser is ended."""

import json
import os
import signal
import subprocess
import sys

import pytest

from storage.store import open_store
from tasks.learner.tiny import tiny_qwen3
from tests.acceptance.lives import SMALL, VARIABLES, stagecoach
from tests.fixtures.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]

ARMS = ("arms-3e-4-s0", "arms-1e-3-s0")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The store of a recorded run of two steps, which is evaluated in a table."""
    place = tmp_path_factory.mktemp("swept")
    # Every fourth row wants what no reply has, so that the differences of policies have a spread.
    rows = [{"prompt": f"say {number}", "answer": "e" if number % 4 else "#"} for number in range(24)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset = f'{{id="own_data",path="{place / "rows.jsonl"}",task={{scoring="contains"}}}}'
    table = f'{{name="letters",taskset={taskset},max_turns=1,every=1}}'
    few = ["steps=2", "rollout.max_tokens=16", "assignment.groups_per_step=3", "evaluation.overlap=false"]
    settings = [f"model.path={tiny_qwen3(place / 'model', seed=3)}", f"evaluation.environments=[{table}]", *few]
    stagecoach("run", "demo", SMALL, *settings, "--name", "base", "--store", str(place / "store"), "--plain")
    return place / "store"


def finished(root, run, stage="training"):
    """The finished work of a stage in a run, by step."""
    return {entry.step: entry for entry in open_store(root).ledger.entries(run=run, stage=stage) if not entry.part}


def test_forks_side_by_side_are_killed_and_begun_again_and_share_what_is_equal(root, tmp_path):
    sweep = ["sweep", "--from", "base:1", "steps=3", "--over", "training.learning_rate=3e-4,1e-3", "--parallel", "2"]
    sweep += ["--name", "arms", "--store", str(root), "--json"]
    command = [sys.executable, "-P", "-m", "flows.cli", *sweep]
    with subprocess.Popen(command, env=os.environ | VARIABLES, stdout=subprocess.DEVNULL) as process:
        until(lambda: any(finished(root, arm) for arm in ARMS) or process.poll() is not None, lambda: "nothing")
        process.send_signal(signal.SIGKILL)
    runs = open_store(root).runs
    until(lambda: not {runs.last_event(arm) for arm in ARMS} & {"started", "resumed"}, lambda: "an arm lives on")
    before = {arm: finished(root, arm) for arm in ARMS}
    printed = stagecoach(*sweep, "--chart", str(tmp_path / "chart.html"))
    assert [row["runs"] for row in json.loads(printed.splitlines()[-1])] == [[arm] for arm in ARMS]
    assert "Held-out average" in (tmp_path / "chart.html").read_text()
    for arm in ARMS:
        assert before[arm].items() <= (after := finished(root, arm)).items() and after.keys() == {1, 2}
    base, one, other = (finished(root, run, "rollout") for run in ("base", *ARMS))
    assert one[1].outputs == other[1].outputs == base[1].outputs, "sampled once, by the recorded run"
    assert one[2].key != other[2].key
    # The first arm has the recorded run's own settings.
    assert finished(root, ARMS[0])[1].key == finished(root, "base")[1].key != finished(root, ARMS[1])[1].key
    one, other = (finished(root, arm, "assignment") for arm in ARMS)
    assert [one[step].outputs for step in (1, 2)] == [other[step].outputs for step in (1, 2)]


def test_a_loser_is_cancelled_with_its_reason_stays_so_and_can_be_resumed(root):
    sweep = ["sweep", "--from", "base:1", "steps=9", "training.learning_rate=2e-4", "--over", "rollout.max_tokens=16,1"]
    sweep += ["--stop-losers", "--name", "race", "--store", str(root), "--plain"]
    assert "race-1-s0 was ended early" in stagecoach(*sweep)
    last = open_store(root).runs.last("race-1-s0")
    assert last.event == "cancelled" and "is worse than that of race-16-s0" in last.message
    steps = finished(root, "race-1-s0").keys()
    assert len(steps) < 8 == len(finished(root, "race-16-s0"))
    assert "race-1-s0 was ended early" in stagecoach(*sweep) and finished(root, "race-1-s0").keys() == steps
    stagecoach("resume", "race-1-s0", "--store", str(root), "--plain")
    assert open_store(root).runs.last_event("race-1-s0") == "finished" and len(finished(root, "race-1-s0")) == 8

"""A real run that is killed while two rollouts wait for a tool between their turns; the next process goes on with them.

The first replies were sampled by the first policy. When the run is killed two others have been trained, and the engine
serves the newest when it goes on.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from storage.store import open_store
from storage.turns import CachedTurn, TurnCache
from tasks.learner.tiny import tiny_qwen3
from tests.acceptance.lives import live
from tests.fixtures.driving import NAME, ROOT, Driven, check_once, check_replayed, committed_groups, rows
from tests.fixtures.faults import happened
from tests.fixtures.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1500)]

STEPS, GROUPS, MEMBERS, BOUND = 4, 3, 2, 2
PLUGINS = ROOT / "tests/fixtures/plugins"
SETTINGS = (
    f"steps={STEPS}",
    'environments=[{name="straggling",taskset={id="straggling"},harness={id="chat_loop"},max_turns=2}]',
    f"assignment.groups_per_step={GROUPS}",
    f"assignment.group_size={MEMBERS}",
    f"rollout.max_off_policy_steps={BOUND}",
    "rollout.keep_turns=true",
    "rollout.max_tokens=8",
    "rollout.max_in_flight=24",
    "rollout.timeout_seconds=3000",
)


@pytest.fixture
def temporary():
    """A directory for temporary files of the run."""
    directory = Path(tempfile.mkdtemp(prefix="sc-"))  # short: sockets are put below it
    yield directory
    shutil.rmtree(directory)


def kept(directory: Path) -> list[CachedTurn]:
    """The turns that the next process of the run would find, of groups that are not committed."""
    store = open_store(directory / "store")
    found, committed = TurnCache(store, NAME), committed_groups(store)
    return [turn for group in found._turns if group not in committed for turn in found.of(group)]


def killed_between_turns(directory: Path, temporary: Path, model: Path) -> list[CachedTurn]:
    """Kill the run when only the two that wait keep a step from its groups; return their turns."""
    request = {"overrides": [f"model.path={model}", *SETTINGS], "kills": {}}
    variables = {"PYTHONPATH": f"{PLUGINS}:{ROOT}", "OMP_WAIT_POLICY": "PASSIVE", "TMPDIR": str(temporary)}
    command = [sys.executable, "-P", "-m", "tests.acceptance.program", str(directory), json.dumps(request)]
    log = directory / "flow.log"
    with log.open("ab") as said:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=said, stderr=said)

    def waits() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        if not (directory / "store/format.json").exists():
            return False
        trained = {entry.step for entry in open_store(directory / "store").ledger.entries(run=NAME, stage="training")}
        return trained == set(range(BOUND)) and len(kept(directory)) == MEMBERS

    try:
        until(waits, lambda: f"{[turn.assignment_id for turn in kept(directory)]}\n{log.read_text()[-4000:]}")
    finally:
        process.kill()
        process.wait()
    happened(f"SIGKILL to {process.pid}, the flow")
    return kept(directory)


@pytest.mark.fault(
    "services",
    "the flow is killed while rollouts are between two turns, and newer policies have been trained",
    "their first turns are not sampled again, and each token has its policy",
)
def test_turns_that_ended_before_a_crash_are_not_sampled_again(tmp_path, temporary):
    model = tiny_qwen3(tmp_path / "model", seed=3)
    turns = killed_between_turns(tmp_path, temporary, model)
    (group_id,) = {turn.group_id for turn in turns}
    os.environ["NUM_STRAGGLERS"] = "0"
    try:
        status, log = live(tmp_path, temporary, model, {}, SETTINGS, PLUGINS)
    finally:
        del os.environ["NUM_STRAGGLERS"]
    assert status == 0, log
    check_once(tmp_path / "store")
    found = rows(open_store(tmp_path / "store"))
    taken = {row["group_id"]: row for row in found["intakes"]}
    assert len(taken) == STEPS * GROUPS and taken[group_id]["step"] == BOUND == taken[group_id]["age"]
    versions = {row["policy_key"]: row["version"] for row in found["policies"]}
    for turn in turns:
        (trace,) = (row for row in found["traces"] if row["assignment_id"] == turn.assignment_id)
        first, second = (row for row in found["messages"] if row["trace_id"] == trace["trace_id"] and row["sampled"])
        (choice,) = json.loads(turn.answer)["choices"]
        assert [t for t, mask in zip(first["token_ids"], first["mask"], strict=True) if mask] == choice["token_ids"]
        assert [versions[key] for key in turn.policies] == [0] == [trace["policy_version"]]
        of_tokens = [row for row in found["token_policies"] if row["trace_id"] == trace["trace_id"]]
        assert [row["message"] for row in of_tokens] == [first["message"], second["message"]]
        before, after = (row["policy_version"] for row in of_tokens)
        assert before == 0 < after <= BOUND
    assert TurnCache(open_store(tmp_path / "store"), NAME)._turns == {}, "turns outlive the run"
    check_replayed(Driven(tmp_path, ()), STEPS)

"""Agents that their owners start take, play and end rollouts through the command `gateway`: a real engine."""

import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import pytest

from configs.environments import EnvironmentConfig
from flows import cli
from tests.fixtures.driving import ROOT
from tests.fixtures.hosts import view_of
from tests.fixtures.sampled import own, sampled
from tests.fixtures.serving import free_port
from tests.fixtures.waiting import until

pytestmark = pytest.mark.engine

REWARDS = {"answer": {"weight": 0}, "reported": {"fn": "program:reported_reward"}}
"""The rewards of a taskset whose own one does not count."""
PROMPTS = ("good", "failed", "silent", "no number")
SECONDS = 12


@contextmanager
def serving(directory):
    """The command in a process of its own; yields a client of it."""
    port = free_port()
    command = [sys.executable, "-m", "flows.cli", "gateway", str(directory), "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | {"STAGECOACH_GATEWAY_KEY": "owner"}, cwd=ROOT)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        try:
            until(lambda: answers(client), lambda: "the gateway does not answer")
            yield client
        finally:
            process.kill()
            process.wait()


def answers(client):
    """Tell whether a gateway is up."""
    try:
        return client.post("/rollouts").status_code == 401
    except httpx.ConnectError:
        return False


def bearer(key):
    """The header of a key."""
    return {"Authorization": f"Bearer {key}"}


def take(client):
    """Take the next rollout."""
    found = []

    def taken():
        answer = client.post("/rollouts", headers=bearer("owner"))
        found.extend([answer.json()] if answer.status_code == 200 else [])
        return found

    until(taken, lambda: "no rollout is open")
    return found[0]


def ask(client, rollout, **body):
    """Make a model call of a rollout."""
    body = {"model": "any", "messages": [{"role": "user", "content": rollout["prompt"]}]} | body
    return client.post("/v1/chat/completions", json=body, headers=bearer(rollout["api_key"]))


def play(client):
    """Play every rollout as its prompt says; return what was refused on the way."""
    taken = {rollout["prompt"]: rollout for rollout in (take(client) for _ in PROMPTS)}
    good, failed = taken["good"], taken["failed"]
    mixed = f"{good['id']}.{failed['api_key'].partition('.')[2]}"
    refused = [ask(client, good | {"api_key": key}).status_code for key in ("x", mixed)]
    for rollout in taken.values():
        ask(client, rollout).raise_for_status()
    assert ask(client, good, stream=True).text.endswith("data: [DONE]\n\n")
    for prompt, report in (
        ("good", {"reward": 0.75}),
        ("failed", {"error": "broken"}),
        ("no number", {"reward": "nan"}),
    ):
        ended = client.post("/rollouts/end", json=report, headers=bearer(taken[prompt]["api_key"]))
        assert ended.json() == {"id": taken[prompt]["id"]}
    refused.append(client.post("/rollouts/end", json={"reward": 1}, headers=bearer(mixed)).status_code)
    return [*refused, good]


def test_rollouts_are_played_by_agents_elsewhere(small_engine, models, tmp_path):
    lines = [json.dumps({"prompt": prompt, "answer": "x"}) for prompt in PROMPTS]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    taskset = {"id": "own_data", "path": str(tmp_path / "rows.jsonl"), "task": {"rewards": REWARDS}}
    harness = {"id": "program", "gateway": str(tmp_path / "open"), "timeout_seconds": SECONDS}
    section = EnvironmentConfig(name="open", taskset=taskset, harness=harness)
    refused = []
    with serving(tmp_path / "open") as client:
        owner = threading.Thread(target=lambda: refused.extend(play(client)))
        owner.start()
        view = lambda environment, **rollout: view_of(models["a"], environment, **rollout)  # noqa: E731
        traces, messages = sampled(small_engine, section, view, tmp_path, num_examples=9, group_size=1)
        owner.join()
        assert client.post("/rollouts", headers=bearer("owner")).status_code == 404
        *refused, good = refused
        assert [*refused, ask(client, good).status_code] == [401] * 4, "keys that no rollout has, or one that is over"
    assert list((tmp_path / "open").iterdir()) == []
    rows = {json.loads(row["record"])["task"]["data"]["prompt"]: row for row in traces}
    assert len(traces) == len(rows) == len(PROMPTS)
    assert rows["good"]["reward"] == 0.75 and rows["good"]["num_turns"] == 2
    assert all(len(m["token_ids"]) == len(m["logprobs"]) for row in traces for m in own(row, messages))
    for prompt, words in (("failed", "broken"), ("silent", f"within {SECONDS} s"), ("no number", "no finite number")):
        assert rows[prompt]["error_type"] == "HarnessError" and words in rows[prompt]["error_message"]


def test_an_address_for_others_needs_a_key(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("STAGECOACH_GATEWAY_KEY", raising=False)
    assert cli.main(["gateway", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "STAGECOACH_GATEWAY_KEY" in capsys.readouterr().err

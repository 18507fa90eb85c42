"""Harnesses of verifiers within limits and without a network: two steps of a real run, forks, and harmful commands."""

import hashlib
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
from verifiers.v1.harnesses.utils.compaction import CHECKPOINT_COMPACTION_PROMPT, POST_COMPACTION_FRAMING

from storage.store import open_store
from tests.acceptance.lives import PLUGINS, stagecoach
from tests.fixtures.containers import container_engine
from tests.fixtures.driving import ROOT, rows
from tests.fixtures.faults import happened
from tests.fixtures.recursive import NO_WAY_BACK, SUB_TASK, SUMMARISE, SYSTEM
from tests.fixtures.shell_talks import DONE, FRIENDLY, SUMMARY, shell_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

SECONDS = 12
HARMFUL = {"Loop": "while :; do :; done", "Swarm": "for i in 1 2 3 4 5 6 7 8; do yes & done; wait"}
VERSION = f"a stand-in of the tests {os.getpid()}"
RLM = Path(f"/tmp/vf-rlm-{hashlib.sha256(VERSION.encode()).hexdigest()}")
"""Where verifiers looks for the program of its harness `rlm` before it fetches that."""
BASH = {"id": "bash", "edit": False, "compaction": {"summarize_at_tokens": 1}}
SETTINGS = (
    *("steps=2", "assignment.groups_per_step=8", "assignment.group_size=2", "evaluation.every=0", "seed=3"),
    *("rollout.temperature=0.01", "rollout.max_attempts=1", "packing.zero_advantages=true"),
    *("engine.max_model_len=512", "engine.memory_gib=0.25", "engine.startup_seconds=600"),
    'filtering.filters=[{type="errored"},{type="zero_advantage",enforce=false}]',
)


def section(name, taskset, harness, seconds=600, **settings):
    """The section of an environment whose harness plays within limits, and without a network."""
    limits = {"network": False, "timeout_seconds": seconds, "max_memory_bytes": 2**30}
    whole = {"id": "program", "harness": harness, **limits}
    return {"name": name, "taskset": taskset, "harness": whole, "holdout_fraction": 0, **settings}


def tasks(file, prompts):
    """A taskset that asks for files, one for each prompt."""
    entries = [{"prompt": prompt, "answer": prompt[-1], "id": prompt} for prompt in prompts]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    rewards = {"answer": {"weight": 0}, "written": {"fn": f"{PLUGINS / 'written.py'}:written"}}
    return {"id": "own_data", "path": str(file), "id_column": "id", "task": {"rewards": rewards}}


@pytest.fixture(scope="module")
def outside():
    """A server of the machine, of which no program of a rollout may know."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.fixture(scope="module")
def recursive():
    """The program of the harness `rlm`, as if it had been installed."""
    RLM.joinpath("bin").mkdir(parents=True)
    program = RLM / "bin/rlm"
    program.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.fixtures.recursive\n")
    program.chmod(0o700)
    (RLM / ".ready").touch()
    yield
    shutil.rmtree(RLM)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, outside):
    """A function that trains the small model in environments for two steps and returns the store."""
    place = tmp_path_factory.mktemp("harnesses")
    call = f"echo > /dev/tcp/127.0.0.1/{outside.getsockname()[1]}"
    model = shell_model(place / "model", {"enable_thinking": False}, {**HARMFUL, "Call": call})

    def train(*sections):
        named = (f"store={place / 'store'}", f"model.path={model}", f"name={sections[0]['name']}")
        environments = f"environments={json.dumps(sections).replace(': ', '=')}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # uv, which verifiers calls
            stagecoach("run", "demo", environments, *SETTINGS, *named, cwd=place)
        return open_store(place / "store")

    return train


@pytest.fixture(scope="module")
def run(trained, recursive, tmp_path_factory):
    """The store of a run in three environments."""
    place = tmp_path_factory.mktemp("tasks")
    trips = {"id": "sample_wikispeedia", "num_topics": 12}
    return trained(
        section("shell", tasks(place / "shell.jsonl", (*FRIENDLY, "Call")), BASH, max_turns=6, weight=3),
        section("harm", tasks(place / "harm.jsonl", HARMFUL), BASH, SECONDS, max_turns=6, weight=2),
        section("walk", trips, {"id": "rlm", "version": VERSION}, weight=3, max_examples=9),
    )


@pytest.fixture(scope="module")
def played(run):
    """What each rollout left, by the first word of its prompt: its row, its messages and its training samples."""
    tables, entries = rows(run, "shell"), {}
    for trace in tables["traces"]:
        its = (
            [row for row in tables[name] if row["trace_id"] == trace["trace_id"]] for name in ("messages", "samples")
        )
        word = json.loads(trace["record"])["task"]["data"]["prompt"].split()[0]
        entries.setdefault(word, []).append((trace, *its))
    return entries


def branches(messages, samples):
    """The texts of each training sample's messages, root first."""
    return sorted([messages[place]["content"] for place in sample["path"]] for sample in samples)


def require_trained(trace, samples):
    """Every sampled token is trained, and once."""
    assert (trace["error_class"], trace["num_branches"]) == (None, len(samples)), trace["error_message"]
    assert sum(sum(sample["rl_weights"]) for sample in samples) == trace["num_output_tokens"] > 0


def test_two_steps_are_trained_on_both_harnesses(run, played):
    assert len(run.ledger.entries(run="shell", stage="training")) == 2
    by_step = {(trace["environment"], trace["policy_version"]) for entries in played.values() for trace, *_ in entries}
    assert by_step == {(name, version) for name in ("shell", "harm", "walk") for version in (0, 1)}


def test_a_command_of_the_model_does_the_task_and_its_compacted_history_is_trained(played):
    for trace, messages, samples in played["Write"]:
        assert trace["reward"] == 1.0
        require_trained(trace, samples)
        goes_on, (_, prompt, _, result, *rest) = sorted(branches(messages, samples), key=len)
        assert prompt in FRIENDLY and [result, *rest] == ["", CHECKPOINT_COMPACTION_PROMPT, SUMMARY]
        assert goes_on[1:] == [f"{POST_COMPACTION_FRAMING}\n\n{SUMMARY}", DONE]


def test_a_recursive_model_is_trained_on_its_history_its_summary_and_its_sub_agent(played):
    for trace, messages, samples in played["Go"]:
        require_trained(trace, samples)
        told, asked, whole = sorted(branches(messages, samples), key=lambda texts: (len(texts), texts[1]))
        assert told[:2] == [SYSTEM, f"so far: {whole[-1]}"] and asked[:2] == [SYSTEM, SUB_TASK]
        assert whole[0] == SYSTEM and whole[3::2] == [NO_WAY_BACK, SUMMARISE]


@pytest.mark.fault("hostile agent", "a model's command never ends", "bounded; one row with its error")
def test_a_command_without_an_end_is_bounded(played):
    for trace, *_ in played["Loop"]:
        happened(trace["error_message"])
        assert (trace["error_type"], trace["num_turns"]) == ("HarnessError", 1)
        assert f"more than {SECONDS} s" in trace["error_message"]


@pytest.mark.fault("hostile agent", "a model's command floods its output", "its program's memory is bounded")
def test_output_without_an_end_is_bounded_by_memory_or_time(played):
    for trace, messages, _ in played["Swarm"]:
        seen = [str(message["content"]) for message in messages] + [trace["error_message"] or ""]
        happened(seen[-1] or seen[3])
        assert trace["reward"] in (0, None) and max(map(len, seen)) < 20_000
        assert seen[3:4] == ["error: "] or trace["error_type"] == "HarnessError"


@pytest.mark.fault("hostile agent", "a model's command calls a service of the machine", "refused; the call never came")
def test_nothing_of_the_machine_is_reached(played, outside):
    for trace, messages, _ in played["Call"]:
        happened(messages[3]["content"])
        assert "Connection refused" in messages[3]["content"] and trace["reward"] == 0
    with pytest.raises(BlockingIOError):
        outside.accept()


@pytest.mark.nightly
def test_the_task_is_done_in_a_container(trained, tmp_path):
    if not (engine := container_engine()):
        pytest.skip("no container engine answers here")
    runtime = {"type": engine, "image": "docker.io/library/python:3.12-slim"}
    task = tasks(tmp_path / "tasks.jsonl", FRIENDLY)
    shell = {**section("contained", task, BASH), "harness": BASH, "runtime": runtime, "max_turns": 6}
    assert {trace["reward"] for trace in rows(trained(shell), "contained")["traces"]} == {1.0}

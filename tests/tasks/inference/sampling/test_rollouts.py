"""Rollouts end to end: a real engine, real environment servers, and everything that may go wrong between them."""

import json
import os
import signal
import threading
import time

import pytest

from configs.environments import EnvironmentConfig, StaticPool
from storage.schemas.stage_tables import MESSAGES, TRACES
from tasks.inference.environments import servers as environments
from tasks.inference.sampling import episode_rows
from tasks.inference.sampling.lost_servers import ServiceLost
from tasks.inference.trace_rows.rows import rebuild
from tasks.runtime.stage import Policy
from tests.fixtures.faults import happened
from tests.fixtures.flagged import flagged
from tests.fixtures.hosts import KEY, assigned, examples_of, served
from tests.fixtures.proxy import path
from tests.fixtures.sampled import collected, own, rows_of, sample
from tests.fixtures.waiting import PATIENCE
from tests.tasks.inference.engine.probes import reference_logprobs

pytestmark = pytest.mark.engine

REVERSE = EnvironmentConfig(name="reverse", taskset={"id": "sample_reverse_text", "num_examples": 20})
FAULTY = EnvironmentConfig(name="faulty", taskset={"id": "faulty_taskset"})


def run(small_engine, address, view, assignments, examples):
    """One call of `sample` with the policy that the engine was started with; returns what was handed over."""
    groups, take = collected()
    policy = Policy("policy-of-rollouts", 3)
    sample(small_engine.url, address, view, assignments, examples, policy=policy, step=4, on_group=take)
    return groups


@pytest.fixture(scope="module")
def reverse_server(tmp_path_factory):
    with served(REVERSE, tmp_path_factory.mktemp("reverse")) as told:
        yield told["address"]


@pytest.fixture(scope="module")
def reverse_examples():
    return examples_of(REVERSE)


@pytest.mark.essential
def test_eight_rollouts_end_to_end(small_engine, models, reverse_server, reverse_examples, view, monkeypatch):
    wire = {}
    read = episode_rows.wire_record

    def remember(trace):
        wire[trace.id] = trace.model_dump(mode="json", context={"float_decimals": None}, serialize_as_any=True)
        return read(trace)

    monkeypatch.setattr(episode_rows, "wire_record", remember)
    small_engine.serve("policy-of-rollouts", models["a"])
    ids = reverse_examples["example_id"].to_pylist()[:2]
    groups = run(small_engine, reverse_server, view(REVERSE), assigned("reverse", ids, 4), reverse_examples)

    assert set(groups) == set(ids)
    for tables in groups.values():
        assert tables["traces"].schema.equals(TRACES.arrow) and tables["messages"].schema.equals(MESSAGES.arrow)
    traces, messages = rows_of(groups, "traces"), rows_of(groups, "messages")
    assert sorted(row["assignment_id"] for row in traces) == sorted(f"{i}/{m}" for i in ids for m in range(4))
    assert KEY not in str(traces) + str(messages)
    for row in traces:
        of_trace = own(row, messages)
        check_trace(row, of_trace)
        check_rebuilt(row, of_trace, wire[row["trace_id"]])
        check_logprobs(of_trace, models["a"])


def check_trace(row, messages):
    """The row's counts and stamps, and that all per-token columns are of one length."""
    assert row["error_class"] is None and row["error_message"] is None
    assert 0.0 <= row["reward"] <= 1.0 and json.loads(row["rewards"])["similarity"]["score"] == row["reward"]
    assert (row["policy_version"], row["staleness"], row["temperature"]) == (3, 1, 1.0)
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert 1 <= row["num_output_tokens"] == sum(sum(message["mask"]) for message in messages) <= 12
    for message in messages:
        assert len(message["token_ids"]) == len(message["mask"]) == len(message["logprobs"])
        assert not any(flagged(message["logprobs"], [not sampled for sampled in message["mask"]]))
        assert all(value <= 0.0 for value in message["logprobs"])


def check_rebuilt(row, messages, wire):
    """The trace put together again is what came over the wire, but for the engine's key."""
    assert wire["agent"]["config"]["client"]["headers"].pop("Authorization") == f"Bearer {KEY}"
    for node in wire["nodes"]:
        del node["routed_experts"], node["sampling_mask"]
    assert rebuild(row, messages) == wire


def check_logprobs(messages, directory):
    """What the engine recorded is what transformers computes on the same tokens."""
    tokens, mask, values = (
        [value for message in messages for value in message[column]] for column in ("token_ids", "mask", "logprobs")
    )
    expected = flagged(reference_logprobs(directory, tokens), mask)
    assert flagged(values, mask) == pytest.approx(expected, abs=1e-4)


@pytest.mark.essential
@pytest.mark.usefixtures("plugins")
def test_every_fault_of_an_environment_is_a_row(small_engine, view, tmp_path):
    examples = examples_of(FAULTY)
    groups, ids = {}, examples["example_id"].to_pylist()
    with served(FAULTY, tmp_path) as told:
        for chosen, seconds in ((["hangs"], 15.0), ([name for name in ids if name != "hangs"], 240.0)):
            config = view(FAULTY, timeout_seconds=seconds, max_attempts=2)
            groups |= run(small_engine, told["address"], config, assigned("faulty", chosen, 1), examples)
    rows = {row["example_id"]: row for row in rows_of(groups, "traces")}
    assert {name: row["error_class"] for name, row in rows.items()} == {
        "none": None,
        "raises": "environment",
        "hangs": "timeout",
        "nan": "environment",
        "too_long": "incomplete",
        "stops_at_setup": "environment",
    }
    assert {name: row["reward"] for name, row in rows.items() if row["reward"] is not None} == {"none": 0.5}
    assert rows["too_long"]["is_truncated"]
    assert "KeyError" in rows["raises"]["error_message"] and "planted" in rows["raises"]["error_traceback"]
    assert rows["nan"]["error_type"] == "NonFiniteReward"
    assert "timeout_seconds = 15" in rows["hangs"]["error_message"] and rows["hangs"]["error_traceback"] is None
    assert "the planted file" in rows["stops_at_setup"]["error_message"]


@pytest.mark.essential
@pytest.mark.usefixtures("plugins")
def test_two_turns_are_one_trace(small_engine, view, tmp_path):
    environment = EnvironmentConfig(name="two", taskset={"id": "two_turns"}, pool=StaticPool(num_workers=2))
    examples = examples_of(environment)
    with served(environment, tmp_path) as told:
        assert environments.answers(told["address"], PATIENCE)
        groups = run(small_engine, told["address"], view(environment), assigned("two", ["t0", "t1"], 2), examples)
    traces = rows_of(groups, "traces")
    # This renderer leaves thinking out of the history as soon as the user speaks again: the second turn is a branch.
    assert [(row["error_message"], row["reward"], row["num_turns"], row["num_branches"]) for row in traces] == [
        (None, 2.0, 2, 2)
    ] * 4
    for row in traces:
        messages = own(row, rows_of(groups, "messages"))
        assert [any(message["mask"]) for message in messages] == [message["sampled"] for message in messages]
        paths = [path(messages, message["message"]) for message in messages if message["sampled"]]
        roles = ["system", "user", "assistant", "user", "assistant"]
        assert [[messages[number]["role"] for number in one] for one in paths] == [roles[:3], roles]


@pytest.mark.fault("services", "an environment server is killed within rollouts", "it is named, whole groups stay")
def test_a_killed_environment_server_is_named(small_engine, reverse_examples, view, tmp_path):
    groups, ids = {}, reverse_examples["example_id"].to_pylist()
    with served(REVERSE, tmp_path) as told:
        kill = threading.Thread(target=lambda: (time.sleep(1.0), os.kill(told["pid"], signal.SIGKILL)))
        kill.start()
        with pytest.raises(ServiceLost, match="environment server 'reverse'") as lost:
            while True:  # until the kill
                rows = assigned("reverse", ids, 8)
                groups = run(small_engine, told["address"], view(REVERSE), rows, reverse_examples)
        kill.join()
        happened(f"SIGKILL to {told['pid']}")
    assert lost.value.service == "environment server 'reverse'"
    assert all(tables["traces"].num_rows == 8 for tables in groups.values())


@pytest.mark.fault("services", "the engine is not there", "it is named, no group")
def test_an_absent_engine_is_named(reverse_server, reverse_examples, view):
    groups, take = collected()
    rows = assigned("reverse", reverse_examples["example_id"].to_pylist()[:1], 2)
    with pytest.raises(ServiceLost, match="the engine"):
        sample("http://127.0.0.1:9", reverse_server, view(REVERSE), rows, reverse_examples, on_group=take)
    assert groups == {}
    happened("nobody listens at port 9")

"""Rollouts end to end: a real engine, real environment servers, and everything that may go wrong between them."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs.environments import EnvironmentConfig, StaticPool
from configs.run import View
from storage.schemas.stage_tables import MESSAGES, TRACES
from tasks.inference.engine.client import Engine
from tasks.inference.environments import servers as environments
from tasks.inference.sampling import episode_rows
from tasks.inference.sampling.lost_servers import ServiceLost
from tasks.inference.trace_rows.rows import rebuild
from tasks.runtime.stage import Policy
from tests.fixtures.faults import happened
from tests.fixtures.hosts import KEY, assigned, served
from tests.fixtures.sampled import sample
from tests.fixtures.waiting import PATIENCE

pytestmark = pytest.mark.engine

REVERSE = EnvironmentConfig(name="reverse", taskset={"id": "sample_reverse_text", "num_examples": 20})
FAULTY = EnvironmentConfig(name="faulty", taskset={"id": "faulty_taskset"})


class Groups:
    """Collects what is handed over, and everything that came over the wire."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, pa.Table]] = {}

    def __call__(self, group_id: str, tables: dict[str, pa.Table]) -> None:
        assert group_id not in self.tables, "a group is handed over once"
        self.tables[group_id] = tables

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [row for tables in self.tables.values() for row in tables[name].to_pylist()]


def run(
    small_engine: Engine, address: str, view: View, assignments: pa.Table, examples: pa.Table, groups: Groups
) -> None:
    """One call of `sample` with the policy that the engine was started with."""
    policy = Policy("policy-of-rollouts", 3)
    sample(small_engine.url, address, view, assignments, examples, policy=policy, step=4, on_group=groups)


@pytest.fixture(scope="module")
def reverse_server(tmp_path_factory):
    with served(REVERSE, tmp_path_factory.mktemp("reverse")) as told:
        yield told["address"]


@pytest.fixture(scope="module")
def reverse_examples():
    return environments.examples(REVERSE)


@pytest.mark.essential
def test_eight_rollouts_end_to_end(
    small_engine,
    models,
    reverse_server,
    reverse_examples,
    view,
    monkeypatch,
):
    wire: dict[str, Any] = {}
    read = episode_rows.wire_record

    def remember(trace: Any) -> Any:
        wire[trace.id] = trace.model_dump(mode="json", context={"float_decimals": None}, serialize_as_any=True)
        return read(trace)

    monkeypatch.setattr(episode_rows, "wire_record", remember)
    small_engine.serve("policy-of-rollouts", models["a"])
    groups, ids = Groups(), reverse_examples["example_id"].to_pylist()[:2]
    run(small_engine, reverse_server, view(REVERSE), assigned("reverse", ids, 4), reverse_examples, groups)

    assert set(groups.tables) == set(ids)
    for tables in groups.tables.values():
        assert tables["traces"].schema.equals(TRACES.arrow) and tables["messages"].schema.equals(MESSAGES.arrow)
    traces, messages = groups.rows("traces"), groups.rows("messages")
    assert sorted(row["assignment_id"] for row in traces) == sorted(f"{i}/{m}" for i in ids for m in range(4))
    assert KEY not in str(traces) + str(messages)
    for row in traces:
        own = [message for message in messages if message["trace_id"] == row["trace_id"]]
        check_trace(row, own)
        check_rebuilt(row, own, wire[row["trace_id"]])
        check_logprobs(own, models["a"])


def check_trace(row: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """The row's counts and stamps, and that all per-token columns are of one length."""
    assert row["error_class"] is None and row["error_message"] is None
    assert 0.0 <= row["reward"] <= 1.0 and json.loads(row["rewards"])["similarity"]["score"] == row["reward"]
    assert (row["policy_version"], row["staleness"], row["temperature"]) == (3, 1, 1.0)
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert 1 <= row["num_output_tokens"] == sum(sum(message["mask"]) for message in messages) <= 12
    for message in messages:
        assert len(message["token_ids"]) == len(message["mask"]) == len(message["logprobs"])
        assert all(value == 0.0 for value, own in zip(message["logprobs"], message["mask"], strict=True) if not own)
        assert all(value <= 0.0 for value in message["logprobs"])


def check_rebuilt(row: dict[str, Any], messages: list[dict[str, Any]], wire: dict[str, Any]) -> None:
    """The trace put together again is what came over the wire, but for the engine's key."""
    assert wire["agent"]["config"]["client"]["headers"].pop("Authorization") == f"Bearer {KEY}"
    for node in wire["nodes"]:
        del node["routed_experts"], node["sampling_mask"]
    assert rebuild(row, messages) == wire


def check_logprobs(messages: list[dict[str, Any]], directory: Path) -> None:
    """What the engine recorded is what transformers computes on the same tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = [token for message in messages for token in message["token_ids"]]
    mask = [own for message in messages for own in message["mask"]]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0], -1)
    expected = [logprobs[at - 1, tokens[at]].item() for at, own in enumerate(mask) if own]
    values = [value for message in messages for value in message["logprobs"]]
    recorded = [value for value, own in zip(values, mask, strict=True) if own]
    assert recorded == pytest.approx(expected, abs=1e-4)


@pytest.mark.essential
def test_the_same_seeds_sample_the_same_tokens(small_engine, reverse_server, reverse_examples, view):
    ids = reverse_examples["example_id"].to_pylist()[:1]
    sampled = []
    for _ in range(2):
        groups = Groups()
        run(small_engine, reverse_server, view(REVERSE), assigned("reverse", ids, 3), reverse_examples, groups)
        by_trace = {row["trace_id"]: row["assignment_id"] for row in groups.rows("traces")}
        answers = [row for row in groups.rows("messages") if row["role"] == "assistant"]
        sampled.append({by_trace[row["trace_id"]]: row["token_ids"] for row in answers})
    assert sampled[0] == sampled[1]
    assert len({tuple(tokens) for tokens in sampled[0].values()}) == 3, "and other seeds sample other ones"


@pytest.mark.essential
@pytest.mark.usefixtures("plugins")
def test_every_fault_of_an_environment_is_a_row(small_engine, view, tmp_path):
    examples = environments.examples(FAULTY)
    groups, ids = Groups(), examples["example_id"].to_pylist()
    with served(FAULTY, tmp_path) as told:
        for chosen, seconds in ((["hangs"], 15.0), ([name for name in ids if name != "hangs"], 240.0)):
            config = view(FAULTY, timeout_seconds=seconds, max_attempts=2)
            run(small_engine, told["address"], config, assigned("faulty", chosen, 1), examples, groups)
    rows = {row["example_id"]: row for row in groups.rows("traces")}
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
    examples = environments.examples(environment)
    groups = Groups()
    with served(environment, tmp_path) as told:
        assert environments.answers(told["address"], PATIENCE)
        run(small_engine, told["address"], view(environment), assigned("two", ["t0", "t1"], 2), examples, groups)
    traces = groups.rows("traces")
    # This renderer leaves thinking out of the history as soon as the user speaks again: the second turn is a branch.
    assert [(row["error_message"], row["reward"], row["num_turns"], row["num_branches"]) for row in traces] == [
        (None, 2.0, 2, 2)
    ] * 4
    for row in traces:
        own = [message for message in groups.rows("messages") if message["trace_id"] == row["trace_id"]]
        sampled = [message["message"] for message in own if message["sampled"]]
        assert [any(message["mask"]) for message in own] == [message["sampled"] for message in own]
        paths = [path(own, number) for number in sampled]
        roles = ["system", "user", "assistant", "user", "assistant"]
        assert [[own[number]["role"] for number in one] for one in paths] == [roles[:3], roles]


def path(messages: list[dict[str, Any]], leaf: int) -> list[int]:
    """Message numbers from the root to `leaf`."""
    parent = messages[leaf]["parent"]
    return [leaf] if parent is None else [*path(messages, parent), leaf]


@pytest.mark.fault("services", "an environment server is killed within rollouts", "it is named, whole groups stay")
def test_a_killed_environment_server_is_named(small_engine, reverse_examples, view, tmp_path):
    groups, ids = Groups(), reverse_examples["example_id"].to_pylist()
    with served(REVERSE, tmp_path) as told:
        kill = threading.Thread(target=lambda: (time.sleep(1.0), os.kill(told["pid"], signal.SIGKILL)))
        kill.start()
        with pytest.raises(ServiceLost, match="environment server 'reverse'") as lost:
            while True:  # until the kill
                again = Groups()
                run(small_engine, told["address"], view(REVERSE), assigned("reverse", ids, 8), reverse_examples, again)
                groups = again
        kill.join()
        happened(f"SIGKILL to {told['pid']}")
    assert lost.value.service == "environment server 'reverse'"
    assert all(tables["traces"].num_rows == 8 for tables in groups.tables.values())


@pytest.mark.fault("services", "the engine is not there", "it is named, no group")
def test_an_absent_engine_is_named(reverse_server, reverse_examples, view):
    groups, ids = Groups(), reverse_examples["example_id"].to_pylist()[:1]
    gone = Engine("http://127.0.0.1:9", KEY)
    with pytest.raises(ServiceLost, match="the engine"):
        run(gone, reverse_server, view(REVERSE), assigned("reverse", ids, 2), reverse_examples, groups)
    assert groups.tables == {}
    happened("nobody listens at port 9")


def test_an_example_that_is_not_there(small_engine, reverse_server, reverse_examples, view):
    with pytest.raises(ValueError, match="1 assigned examples are not in the examples table"):
        run(small_engine, reverse_server, view(REVERSE), assigned("reverse", ["no"], 1), reverse_examples, Groups())

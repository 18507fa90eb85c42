"""Files that verifiers and prime-rl write: read as rows, refused by line, and given back as they were."""

import copy
import json
from datetime import UTC, datetime
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.schemas.contract import RowPlace, check_rows
from storage.schemas.stage_tables import MESSAGES, TRACES
from tasks.exchange.episodes import ImportContext, count_reasons
from tasks.exchange.trace_import import arrange
from tasks.exchange.traces import source_of, trace_rows
from tasks.exchange.verifiers_lines import read_episode
from tests.fixtures.commands import cases
from tests.tasks.exchange.lines import ORIGIN, READING, letters, one, read, verifiers_lines


def node(number, **values):
    """Return what sets fields of a node."""
    return lambda trace: trace["nodes"][number].update(values)


def imported(path, lines):
    """Read and place lines that are all good."""
    episodes, problems = read(path, lines)
    assert problems == []
    return arrange(episodes)


def test_what_the_command_line_wrote_becomes_rows_of_the_contract(tmp_path):
    found = imported(tmp_path / "t.jsonl", verifiers_lines("tokens"))
    traces, messages = found.rows(0)
    check_rows(traces, TRACES, RowPlace("traces"))
    check_rows(messages, MESSAGES, RowPlace("messages"))
    assert traces.num_rows == 10 and messages.num_rows == 20
    assert set(traces["policy_key"].to_pylist()) == {"imported"}
    assert set(traces["temperature"].to_pylist()) == {1.0}
    assert set(traces["environment"].to_pylist()) == {"reverse_text"}
    assert set(traces["stop_condition"].to_pylist()) == {"agent_completed"}
    assert traces["error_class"].null_count == 10
    sizes = {group: traces["group_id"].to_pylist().count(group) for group in traces["group_id"].to_pylist()}
    assert sizes == {"0-0": 5, "0-1": 5}, "rollouts of one example are a group"
    assert found.examples()["example_id"].to_pylist() == ["mzjp", "ynbi"]
    assert found.assignments(0)["assignment_id"].to_pylist() == [f"0-{g}/{m}" for g in range(2) for m in range(5)]


def test_the_columns_of_one_trace():
    line = one()
    trace = line["traces"][0]
    row, messages = trace_rows(trace, ImportContext(), {})
    assert row["trace_id"] == trace["id"]
    assert row["reward"] == trace["rewards"]["similarity"]["score"]
    assert json.loads(row["metrics"]) == trace["metrics"]
    assert row["started_at"] == datetime.fromtimestamp(trace["timing"]["start"], UTC)
    assert (row["num_turns"], row["num_branches"]) == (1, 1)
    assert row["num_output_tokens"] == len(trace["nodes"][1]["logprobs"]) > 0
    answer = messages[1]
    assert answer["token_ids"] == trace["nodes"][1]["token_ids"]
    said = [value for value, flag in zip(answer["logprobs"], answer["mask"], strict=True) if flag]
    assert said == trace["nodes"][1]["logprobs"]


@pytest.mark.parametrize("name", ["tokens", "relayed"])
def test_a_trace_is_given_back_as_it_was(name):
    for line in verifiers_lines(name):
        trace = line["traces"][0]
        row, messages = trace_rows(trace, READING, {})
        assert source_of(row, messages) == trace


EXTRA = st.dictionaries(
    st.sampled_from(["extra", "imported", "stagecoach_note", "x"]),
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.lists(st.integers(), max_size=3),
)
OPTIONAL = st.sets(st.sampled_from(["metrics", "info", "errors", "calls", "tools", "timing", "agent", "version", "ok"]))


@settings(max_examples=25)
@given(extra=EXTRA, gone=OPTIONAL, of_node=EXTRA, scores=st.lists(st.floats(-30, 0, allow_nan=False), min_size=1))
def test_unknown_and_absent_fields_come_back_too(extra, gone, of_node, scores):
    trace = {name: value for name, value in one()["traces"][0].items() if name not in gone} | extra
    answer = trace["nodes"][1]
    answer |= of_node | {"token_ids": [7] * len(scores), "mask": [True] * len(scores), "logprobs": scores}
    answer["is_content"] = []
    row, messages = trace_rows(copy.deepcopy(trace), ImportContext(), {"file": 0})
    assert source_of(row, messages) == trace
    assert json.loads(row["record"])["imported"]["file"] == 0, "the mark is ours, whatever the trace calls its fields"


def test_text_without_tokens_is_rendered_and_marked():
    trace = verifiers_lines("relayed")[0]["traces"][0]
    row, messages = trace_rows(trace, ImportContext(render=letters), {})
    assert row["policy_key"] == "" and json.loads(row["record"])["imported"]["tokens"] == "rendered"
    asked, answered = (node["message"]["content"] for node in trace["nodes"])
    assert messages[0]["token_ids"] == [ord(letter) for letter in f"u{asked}"]
    assert messages[1]["token_ids"] == [ord(letter) for letter in f"a{answered}"]
    assert messages[1]["mask"] == [False, *[True] * len(answered)] and not any(messages[0]["mask"])
    assert set(messages[1]["logprobs"]) == {0.0}
    assert row["num_output_tokens"] == len(answered)


def test_token_ids_without_log_probs_are_marked():
    trace = one(node(1, logprobs=[]))["traces"][0]
    row, messages = trace_rows(trace, ImportContext(), {})
    assert row["policy_key"] == "" and json.loads(row["record"])["imported"]["tokens"] == "given"
    assert set(messages[1]["logprobs"]) == {0.0}
    assert source_of(row, messages) == trace


def test_an_unknown_temperature_is_marked():
    def forget(trace):
        trace["calls"][0]["sampling"] = trace["agent"]["config"]["sampling"] = None

    row, _ = trace_rows(one(forget)["traces"][0], ImportContext(), {})
    assert (row["temperature"], json.loads(row["record"])["imported"]["temperature"]) == (1.0, "unknown")
    known, _ = trace_rows(one()["traces"][0], ImportContext(), {})
    assert "temperature" not in json.loads(known["record"])["imported"]


def positive(trace):
    trace["nodes"][1]["logprobs"][0] = 0.5


def infinite(trace):
    trace["nodes"][1]["logprobs"][0] = float("-inf")


def two_temperatures(trace):
    trace["calls"].append({"sampling": {"temperature": 0.5}})


def check_bad(path, bad, reason):
    """Read a good line and a bad one; the bad one is named."""
    episodes, problems = read(path / "t.jsonl", ["", one(), bad])
    assert [episode.origin.line for episode in episodes] == [2], "the good line is good"
    (problem,) = problems
    assert problem.line == 3 and problem.reason.startswith(reason), problem


@cases(__file__, "texts")
def test_a_bad_text_is_named(text, reason, tmp_path):
    check_bad(tmp_path, text, reason)


@cases(__file__, "changes")
def test_a_bad_line_is_named(node, value, reason, tmp_path):
    bad = one()
    (trace,) = bad["traces"]
    (trace if node == "none" else trace["nodes"][node]).update(json.loads(value))
    check_bad(tmp_path, bad, reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (positive, "nodes.logprobs: Input should be less than or equal to 0"),
        (infinite, "nodes.logprobs: Input should be greater than or equal to -3"),
        (two_temperatures, "calls of one trace differ in temperature"),
        (lambda trace: trace.pop("id"), "id: Field required"),
    ],
)
def test_a_bad_value_within_a_line_is_named(change, reason, tmp_path):
    check_bad(tmp_path, one(change), reason)


def test_reasons_are_few_and_details_name_the_place(tmp_path):
    changes = [
        *(partial(dict.update, rewards={name: {"score": 1, "weight": True}}) for name in "ab"),
        *(node(1, mask=[True] * number) for number in (1, 2)),
        node(1, parent=7),
        partial(dict.update, metrics={"a": 10**90}),
    ]
    _, problems = read(tmp_path / "t.jsonl", [one(change) for change in changes])
    assert [*count_reasons(problems).values()] == [2, 2, 1, 1]
    places = [
        "rewards.a.weight",
        "rewards.b.weight",
        "nodes.1 has",
        "nodes.1 has",
        "nodes.1.parent is 7",
        "metrics.a is",
    ]
    for problem, place in zip(problems, places, strict=True):
        assert problem.detail.startswith(place), problem


def test_no_reward_is_not_a_reward_of_zero(tmp_path):
    zero = {"similarity": {"score": 0, "weight": 1.0}}
    lines = [one(partial(dict.update, rewards=rewards)) for rewards in ({}, zero)]
    episodes, _ = read(tmp_path / "t.jsonl", lines)
    assert [episode.traces[0]["reward"] for episode in episodes] == [None, 0.0]


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    _, problems = read(tmp_path / "t.jsonl", [one()], ImportContext(vocab_size=200))
    assert [problem.reason for problem in problems] == ["a token id is out of range"]


def test_text_is_refused_where_no_model_was_named(tmp_path):
    _, problems = read(tmp_path / "t.jsonl", verifiers_lines("relayed"), ImportContext())
    assert [problem.line for problem in problems] == [1, 2, 3, 4]
    assert "--model" in problems[0].reason


def test_errors_are_rows(tmp_path):
    error = {"type": "TimeoutError", "message": "too slow"}
    broken = one(lambda trace: trace.update(ok=False, errors=[error], id="broken"))
    whole = {**one(lambda trace: trace.update(id="whole")), "ok": False, "errors": [error]}
    nothing = {**one(), "ok": False, "errors": [error], "traces": []}
    traces = imported(tmp_path / "t.jsonl", [broken, whole, nothing]).rows(0)[0]
    assert traces["error_class"].to_pylist() == ["timeout"] * 3
    assert traces["reward"].to_pylist() == [None] * 3


PRIME_RUN = {"type": "train", "id": "r", "work": {"type": "train", "step": 4, "policy": {"start": 2, "end": 3}}}


def prime_episode(line):
    """Lay a line out as prime-rl writes episodes."""
    return {**line, "run": PRIME_RUN, "group": {"id": "g"}, "env": {"id": "reverse_text", "name": "rev"}}


def prime_trace(line):
    """Lay a line out as prime-rl wrote traces by themselves, with what ran them in info."""
    info = {"env_name": "rev", "group_id": "g", "episode_id": line["id"], "policy_version": 2}
    return {**line["traces"][0], "info": info, "run": {"type": "train", "id": "r", "step": 4}}


@pytest.mark.parametrize("layout", [prime_episode, prime_trace])
def test_layouts_of_prime_rl(layout, tmp_path):
    lines = [layout(line) for line in verifiers_lines("tokens")[:2]]
    path = tmp_path / "rollouts/step_4/train/effective/traces.jsonl"
    path.parent.mkdir(parents=True)
    found = imported(path, lines)
    assert list(found.steps) == [4]
    traces = found.rows(4)[0]
    assert set(traces["environment"].to_pylist()) == {"rev"}
    assert set(traces["policy_version"].to_pylist()) == {2}
    assert set(traces["staleness"].to_pylist()) <= {0, 1}
    assert len(set(traces["group_id"].to_pylist())) == 2, "a group of the file is split by example"
    rows = zip(traces.to_pylist(), lines, strict=True)
    own = found.rows(4)[1].to_pylist()
    for row, line in rows:
        trace = line["traces"][0] if "traces" in line else line
        assert source_of(row, [one for one in own if one["trace_id"] == row["trace_id"]]) == trace


def test_traces_of_one_episode_are_joined(tmp_path):
    solver, judge = (prime_trace(line) for line in verifiers_lines("tokens")[:2])
    judge["info"]["episode_id"] = solver["info"]["episode_id"]
    judge["agent"] |= {"name": "judge", "trainable": False}
    found = imported(tmp_path / "t.jsonl", [solver, judge])
    assert found.assignments(4).num_rows == 1
    assert found.rows(4)[0]["agent"].to_pylist() == ["agent", "judge"]
    assert found.rows(4)[0]["trainable"].to_pylist() == [True, False]
    assert len(set(found.rows(4)[0]["assignment_id"].to_pylist())) == 1


def test_another_environment_may_be_named():
    assert read_episode(one(), ORIGIN, ImportContext(environment="mine"), None).environment == "mine"

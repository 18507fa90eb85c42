"""Agent programs behind the harness `program`, friendly and hostile ones side by side: a real engine and server."""

import json
import sys
from pathlib import Path

import psutil
import pytest

from configs.environments import EnvironmentConfig
from tasks.inference.environments.servers import EnvironmentUnavailable, load_all
from tests.fixtures.faults import happened
from tests.fixtures.hosts import PLUGINS, view_of
from tests.fixtures.sampled import own, sampled

pytestmark = [pytest.mark.engine, pytest.mark.essential]

AGENT = PLUGINS.parent / "agent.py"
SECONDS, MOST_CALLS = 20, 8
HOSTILE = {
    "huge": ("HarnessError", "413"),
    "slow": ("HarnessError", f"more than {SECONDS} s"),
    "intrude": ("HarnessError", "refused: [401, 401, 401]"),
    "stay": ("HarnessError", f"more than {SECONDS} s"),
    "print_all": ("HarnessError", "printed more than 100000 bytes"),
    "fail": ("HarnessError", "no such tool"),
}
"""What a hostile program does, and the error of its rollout."""
FRIENDLY = ("talk", "stream", "responses", "leave")


def environment(place, *prompts, **harness):
    """An environment whose prompts say what the agent program does."""
    rows = [{"prompt": prompt, "answer": prompt, "id": prompt} for prompt in prompts]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset = {"id": "own_data", "path": str(place / "rows.jsonl"), "id_column": "id"}
    command = [sys.executable, str(AGENT), str(place)]
    limits = {"timeout_seconds": SECONDS, "max_output_bytes": 100_000, "max_calls": MOST_CALLS}
    given = {"id": "program", "command": command, "forward_env": ["FORWARDED"], **limits, **harness}
    return EnvironmentConfig(name="agents", taskset=taskset, harness=given, holdout_fraction=0)


@pytest.fixture(scope="module")
def played(small_engine, models, tmp_path_factory):
    """What each program left in the tables, by its prompt, all sampled at once, and the directory of its files."""
    place = tmp_path_factory.mktemp("agents")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OF_THE_FLOW", "a secret")
        patch.setenv("FORWARDED", "a setting")
        section = environment(place, *FRIENDLY, *HOSTILE, "loop")
        view = lambda environment, **rollout: view_of(models["a"], environment, **rollout)  # noqa: E731
        traces, messages = sampled(small_engine, section, view, place, num_examples=99, group_size=1)
    assert len(traces) == len(FRIENDLY) + len(HOSTILE) + 1, "one row each"
    return {json.loads(row["record"])["task"]["data"]["prompt"]: (row, own(row, messages)) for row in traces}, place


def test_every_call_is_recorded_by_its_tokens(played):
    for prompt in FRIENDLY:
        row, messages = played[0][prompt]
        assert row["error_class"] is None, row["error_message"]
        assert all(len(m["token_ids"]) == len(m["mask"]) == len(m["logprobs"]) for m in messages)
        assert sum(sum(m["mask"]) for m in messages) == row["num_output_tokens"] > 0
        assert row["policy_version"] == 0 and row["policy_key"] == "policy"
    row, messages = played[0]["talk"]
    # A fork and a history that was cut short; and where a reply that was cut off comes back, a branch for that.
    assert row["num_turns"] == 4 and row["num_branches"] in (3, 4)
    (one, *_), (summary,) = ([m for m in messages if m["content"] == said] for said in ("one", "so far: one, two"))
    assert one["parent"] == summary["parent"], "both begin a conversation"


def test_the_responses_api_has_the_same_tokens_as_a_chat(played):
    rows, place = played
    row, messages = rows["responses"]
    assert row["num_turns"] == 2 and row["error_class"] is None
    told = json.loads((place / "events.json").read_text())
    said = "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta")
    assert said == [m["content"] for m in messages if m["sampled"]][-1]


def test_a_program_gets_no_variable_but_its_own(played):
    variables = json.loads((played[1] / "variables.json").read_text())
    assert "OF_THE_FLOW" not in variables and variables["FORWARDED"] == "a setting"
    assert variables["HOME"] == variables["TMPDIR"] != str(Path.home())


@pytest.mark.fault("hostile agent", "an agent program is hostile", "one row with its error; the others are as before")
@pytest.mark.parametrize("prompt", HOSTILE)
def test_a_hostile_program_is_one_row_with_its_error(played, prompt):
    row, _ = played[0][prompt]
    happened(row["error_message"])
    kind, words = HOSTILE[prompt]
    assert (row["error_class"], row["error_type"]) == ("environment", kind) and words in row["error_message"]


def test_calls_without_end_are_cut_as_by_a_limit_of_turns(played):
    row, messages = played[0]["loop"]
    assert row["stop_condition"] == "max_turns" and MOST_CALLS <= sum(m["sampled"] for m in messages) < 10 * MOST_CALLS


@pytest.mark.parametrize("file", ["child", "left"])
def test_no_process_of_a_program_is_left(played, file):
    assert not psutil.pid_exists(int((played[1] / file).read_text()))


@pytest.mark.parametrize(
    ("harness", "words"),
    [
        ({"command": ["no-such-agent"]}, "there is no program 'no-such-agent' here"),
        ({"files": ["absent.yaml"]}, "there is no file 'absent.yaml'"),
        ({"gateway": "x"}, "either a command or a gateway"),
        ({"harness": {"id": "bash"}}, "or another harness"),
        ({"command": [], "gateway": "x", "network": False}, "its owner's"),
    ],
)
def test_a_program_that_is_not_there_is_said_before_anything_starts(tmp_path, harness, words):
    with pytest.raises(EnvironmentUnavailable, match=words):
        load_all([environment(tmp_path, "talk", **harness)])

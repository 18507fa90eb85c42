"""Environments and tasksets that ship with verifiers run unchanged: real servers, a real engine, exact rows."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from configs.environments import EnvironmentConfig
from tasks.inference.environments.examples import verifiers_config
from tests.fixtures.hosts import examples_of
from tests.fixtures.sampled import failures, own, sampled

pytestmark = pytest.mark.engine

REVERSE = {"id": "sample_reverse_text", "num_examples": 4}
REWARD = 0.625


class Handler(BaseHTTPRequestHandler):
    """A NeMo Gym resource server as small as one can be: it seeds sessions and verifies, and keeps what it verified."""

    verified: list[dict[str, Any]]

    def do_GET(self):
        """Say that the server is there."""
        self._answer({})

    def do_POST(self):
        """Seed a session, or verify a response."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/verify"):
            self.verified.append(asked)
            self._answer({**asked, "reward": REWARD, "length": len(asked["response"]["output"])})
        else:
            self._answer({})

    def log_message(self, format, *args):
        """Say nothing."""

    def _answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def resource_server():
    """Serve until the block ends; yield the address and what was verified so far."""
    verified = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"verified": verified}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", verified
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def dataset(path):
    """Write the rows of a dataset in the form of NeMo Gym; return the path."""
    asked = [{"role": "user", "content": "1 + 2"}]
    rows = [{"responses_create_params": {"input": asked, "tools": []}, "answer": 3, "extra": {"kept": [1.5, None]}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def check_tokens(traces, messages):
    """What each call was given and gave is its path of the graph; lists are of one length, sampled tokens as counted.

    A reply whose text has other tokens may come back in these: then a branch begins, which is counted.
    """
    for row in traces:
        mine = own(row, messages)
        assert all(m["parent"] is None or m["parent"] < number for number, m in enumerate(mine))
        assert all(len(m["token_ids"]) == len(m["mask"]) == len(m["logprobs"]) for m in mine)
        assert sum(sum(m["mask"]) for m in mine) == row["num_output_tokens"] > 0
        assert row["num_turns"] == sum(m["sampled"] for m in mine)
        assert row["num_branches"] == len(mine) - len({m["parent"] for m in mine} - {None})
        for call in json.loads(row["record"])["calls"]:
            used = call["usage"]["prompt_tokens"] + call["usage"]["completion_tokens"]
            assert used + (call["usage"]["cached_input_tokens"] or 0) == length(mine, call["node"])


def length(messages, node):
    """The tokens from the root to a message."""
    return 0 if node is None else len(messages[node]["token_ids"]) + length(messages, messages[node]["parent"])


@pytest.mark.essential
def test_best_of_n_is_several_traces_of_one_episode(small_engine, view, tmp_path):
    environment = EnvironmentConfig(name="best", taskset=REVERSE, env={"id": "best-of-n", "n": 3})
    traces, messages = sampled(small_engine, environment, view, tmp_path)
    assert failures(traces) == [] and len(traces) == 6
    check_tokens(traces, messages)
    for assignment in ("0", "1"):
        attempts = [row for row in traces if row["assignment_id"].endswith(f"/{assignment}")]
        assert len({row["episode_id"] for row in attempts}) == 1 and len({row["trace_id"] for row in attempts}) == 3
        top = max(row["reward"] for row in attempts)
        assert [json.loads(row["metrics"])["best"] for row in attempts] == [row["reward"] == top for row in attempts]


@pytest.mark.nightly
def test_a_user_that_a_model_plays_is_not_trained_on(small_engine, view, tmp_path):
    env = {"id": "user-sim", "persona": "{scenario}", "user": {"max_turns": 2}}
    environment = EnvironmentConfig(name="user", taskset=REVERSE, env=env)
    traces, messages = sampled(small_engine, environment, view, tmp_path, max_tokens=6)
    assert failures(traces) == [] and len(traces) == 4
    check_tokens(traces, messages)
    seats = {(row["agent"], row["trainable"]) for row in traces}
    assert seats == {("assistant", True), ("user", False)}
    for row in traces:
        user = [m for m in own(row, messages) if m["sampled"]]
        theirs = next(r for r in traces if r["episode_id"] == row["episode_id"] and r["agent"] != row["agent"])
        heard = [m["content"] for m in own(theirs, messages) if m["role"] == "user"]
        assert {m["content"] for m in user} & set(heard), "what one says the other hears"


@pytest.mark.nightly
def test_a_game_of_textarena_has_its_prompts():
    pytest.importorskip("textarena", reason="textarena is not installed: docs/environments.md says how")
    taskset = {"id": "textarena", "game": "Hangman-v0"}
    examples = examples_of(EnvironmentConfig(name="game", taskset=taskset, max_examples=2)).to_pylist()
    assert len(examples) == 2 and all("Hangman" in str(example) for example in examples)


@pytest.mark.nightly
def test_a_taskset_scored_by_a_server_of_its_own(small_engine, view, tmp_path):
    with resource_server() as (url, verified):
        taskset = {"id": "nemo_gym", "dataset": str(dataset(tmp_path / "sums.jsonl")), "task": {"resources_url": url}}
        environment = EnvironmentConfig(name="nemo", taskset=taskset, max_turns=2)
        traces, messages = sampled(small_engine, environment, view, tmp_path)
    assert failures(traces) == [] and len(traces) == len(verified) == 2
    check_tokens(traces, messages)
    assert [row["reward"] for row in traces] == [REWARD] * 2
    data = json.loads(traces[0]["record"])["task"]["data"]
    assert data["row"]["extra"] == {"kept": [1.5, None]}, "fields that nobody here knows survive"
    assert [asked["answer"] for asked in verified] == [3, 3]


@pytest.mark.parametrize("harness", [{"id": "chat_loop"}, {"id": "null"}, {"id": "bash", "edit": False}], ids=str)
@pytest.mark.parametrize("runtime", [{"type": "subprocess"}, {"type": "docker", "image": "python:3.11-slim"}], ids=str)
@pytest.mark.parametrize(("env", "seat"), [({}, "agent"), ({"id": "best-of-n"}, "agent"), ({"id": "user-sim"}, "user")])
def test_harness_and_runtime_are_settings(harness, runtime, env, seat):
    environment = EnvironmentConfig(name="any", taskset=REVERSE, env=env, harness=harness, runtime=runtime)
    config = verifiers_config(environment.model_dump())
    assert config.taskset.id == "sample_reverse_text"
    found = getattr(config, seat).model_dump()
    for wanted, name in ((harness, "harness"), (runtime, "runtime")):
        assert {key: found[name][key] for key in wanted} == wanted

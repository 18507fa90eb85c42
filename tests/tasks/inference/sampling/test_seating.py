"""Who plays which seat: each request names its models, and every call goes where it says, under its own salt and seed.

One small engine stands behind two doors that write down what is asked; each of them has a name, a key and an address.
"""

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from configs.environments import EnvironmentConfig
from tasks.inference.engine.client import MODEL, ServedModel
from tasks.inference.environments.agent_runs import ROLLOUT_HEADER, SEED_STRIDE
from tasks.inference.sampling.seats import seat_model_name
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import KEY, assigned, examples_of, served, view_of
from tests.fixtures.sampled import rows_of, sample

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

RIVALS = EnvironmentConfig.model_validate(
    {
        "name": "rivals",
        "taskset": {"id": "rivals"},
        "env": {"num_rounds": 2},
        "seats": {
            "first": {"temperature": 0.5, "top_k": 50, "stop": ["stop it"]},
            "second": {"model": {"url": "http://stands.elsewhere"}},
            "judge": {"trainable": False, "max_turns": 2},
        },
    }
)
OWN_KEY = "the-key-of-the-opponent"


@dataclass
class Door:
    """A way into the engine that is known under a model name and a key of its own."""

    url: str
    calls: list = field(default_factory=list)


@contextmanager
def door(engine, name, key):
    """Serve the engine under another address; a request with another name or key is refused."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer(httpx.get(f"{engine.url}{self.path}", headers={"Authorization": f"Bearer {KEY}"}, timeout=120))

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            opened.calls.append(asked | {"headers": dict(self.headers)})
            right = (asked["model"], self.headers["Authorization"]) == (name, f"Bearer {key}")
            headers = {"Authorization": f"Bearer {KEY if right else 'wrong'}"}
            request = asked | {"model": MODEL}
            self._answer(httpx.post(f"{engine.url}{self.path}", json=request, headers=headers, timeout=120))

        def _answer(self, answer):
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers.get("content-type", "application/json"))
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    opened = Door(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield opened
    finally:
        server.shutdown()
        server.server_close()


@dataclass
class Played:
    """One call of `sample` over all faults: what the two models were asked, and the rows."""

    policy: Door
    opponent: Door
    rows: dict
    messages: list

    def of(self, fault, agent):
        return [row for row in self.rows[fault] if row["agent"] == agent]


@pytest.fixture(scope="module")
def played(small_engine, models, tmp_path_factory, plugins_of_module):
    with (
        served(RIVALS, tmp_path_factory.mktemp("rivals")) as told,
        door(small_engine, MODEL, KEY) as policy,
        door(small_engine, "the-opponent", OWN_KEY) as opponent,
    ):
        rival = ServedModel(opponent.url, OWN_KEY, "the-opponent", "its weights")
        found = sample(
            policy.url,
            told["address"],
            view_of(models["a"], RIVALS, max_attempts=1),
            assigned("rivals", ["none", "member", "run", "finalize"], 1),
            examples_of(RIVALS),
            policy=Policy("the-policy", 3),
            step=4,
            others={seat_model_name("rivals", "seats.second.model"): rival},
        )
        rows = {name: tables["traces"].to_pylist() for name, tables in found.items()}
        yield Played(policy, opponent, rows, rows_of(found, "messages"))


@pytest.mark.essential
def test_every_call_goes_to_the_model_of_its_seat(played):
    assert {call["model"] for call in played.policy.calls} == {MODEL}
    assert {call["model"] for call in played.opponent.calls} == {"the-opponent"}
    assert {call["cache_salt"] for call in played.policy.calls} == {"the-policy"}
    assert {call["cache_salt"] for call in played.opponent.calls} == {"its weights"}
    assert {call["headers"]["Authorization"] for call in played.opponent.calls} == {f"Bearer {OWN_KEY}"}
    ours, theirs = 4 * 2 + 3, 4 * 2  # two rounds of four episodes; the judge is called in all but one
    assert (len(played.policy.calls), len(played.opponent.calls)) == (ours, theirs)
    names = {name.lower() for call in [*played.policy.calls, *played.opponent.calls] for name in call["headers"]}
    assert ROLLOUT_HEADER.lower() not in names


@pytest.mark.essential
def test_every_call_carries_the_session_of_its_trace(played):
    calls = [*played.policy.calls, *played.opponent.calls]
    sessions = {call["headers"]["X-Session-ID"] for call in calls}
    assert sessions == {row["trace_id"] for rows in played.rows.values() for row in rows if row["num_turns"]}


@pytest.mark.essential
def test_each_run_of_an_episode_has_a_seed_of_its_own_and_the_rows_say_it(played):
    rows = played.rows["none"]
    assert [row["agent"] for row in rows] == ["first", "second", "first", "second", "judge"]
    seeds = [json.loads(row["record"])["agent"]["config"]["sampling"]["seed"] for row in rows]
    assert seeds == [number * SEED_STRIDE for number in range(5)]
    asked = sorted(call["sampling_params"]["seed"] for call in [*played.policy.calls, *played.opponent.calls])
    assert set(seeds) <= set(asked)
    tokens = {row["trace_id"]: [] for row in rows}
    for message in played.messages:
        if message["sampled"] and message["trace_id"] in tokens:
            tokens[message["trace_id"]] += message["token_ids"]
    one, again = (tokens[row["trace_id"]] for row in played.of("none", "first"))
    assert one and again and one != again, "two runs on one prompt are two draws"


@pytest.mark.essential
def test_rows_of_a_frozen_seat_are_nobody_s_and_those_of_the_policy_are_its(played):
    columns = ("agent", "trainable", "policy_key", "policy_version", "staleness")
    assert {tuple(row[name] for name in columns) for row in played.rows["none"]} == {
        ("first", True, "the-policy", 3, 1),
        ("second", False, "", 4, 0),
        ("judge", False, "the-policy", 3, 1),
    }


@pytest.mark.essential
def test_rows_have_the_temperature_of_their_seat(played):
    found = {row["agent"]: row["temperature"] for row in played.rows["none"]}
    assert found == {"first": 0.5, "second": 1.0, "judge": 1.0}
    assert {call["sampling_params"]["temperature"] for call in played.opponent.calls} == {1.0}
    sent = [call["sampling_params"] for call in played.policy.calls]
    found = {(each["temperature"], each.get("top_k"), each["detokenize"]) for each in sent}
    assert found == {(0.5, 50, True), (1.0, None, False)}, "its own settings alone, and what `stop` needs"


@pytest.mark.essential
def test_no_row_holds_a_key_or_word_of_the_request_s_header(played):
    text = json.dumps([played.rows, played.messages], default=str)
    assert KEY not in text and OWN_KEY not in text and ROLLOUT_HEADER not in text


@pytest.mark.essential
def test_an_agent_s_own_error_leaves_the_others_what_they_earned(played):
    """The environment went on and scored them; the reward of the errored one is none, and not zero."""
    assert {(row["reward"], row["error_class"]) for row in played.of("member", "first")} == {(1.25, None)}
    assert {(row["reward"], row["error_class"]) for row in played.of("member", "second")} == {(None, "environment")}
    assert {row["error_class"] for row in played.of("none", "second")} == {None}

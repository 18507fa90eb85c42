"""A model of someone else, evaluated through its chat API alone: a real engine whose tokens nobody is shown."""

import json

import pytest

from configs.run import RunConfig
from flows.runtime import loop as evaluating
from flows.runtime.executor import Executor
from flows.runtime.loop import loop_evaluate, plan_work
from flows.runtime.resolve_run import Source
from flows.runtime.session import Session, needs
from flows.services.base import Supervisor
from storage.store import open_store
from tasks.runtime.run_context import RunContext
from tests.fixtures.hosts import KEY
from tests.fixtures.rehearsal import Played

pytestmark = [pytest.mark.engine, pytest.mark.essential]
NOTHING = Source("", "")


class AtOnce(Executor):
    """Does stages as in a run, without Prefect."""

    def __call__(self, task, *arguments, **named):
        return super().__call__(Played(task.stage), *arguments, **named)


def session_of(root, url, name, supervisor, **external):
    chat = {"url": f"{url}/v1", "model": "policy", "api_key_variable": "KEY_OF_THE_TEST"} | external
    config = RunConfig.model_validate(
        {
            **{"name": name, "kind": "evaluate", "store": str(root), "seed": 7},
            "environments": ({"name": "reverse", "taskset": {"id": "sample_reverse_text", "num_examples": 40}},),
            "evaluation": {"num_examples": 2, "attempts": 2, "pass_at": (1, 2), "external": chat},
            "rollout": {"max_tokens": 8, "max_attempts": 1, "timeout_seconds": 240},
        }
    )
    return Session(RunContext(open_store(root), name, config, {}), NOTHING, supervisor)


def test_a_chat_api_is_evaluated_like_a_policy_and_shows_no_tokens(small_engine, tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_THE_TEST", KEY)
    monkeypatch.setattr(evaluating, "Executor", AtOnce)
    with Supervisor("external", tmp_path / "logs") as supervisor:
        session = session_of(tmp_path / "store", small_engine.url, "one", supervisor)
        missing = [piece for piece in plan_work(session.context, session.source) if piece.computed]
        assert needs(missing, session.config) == ["environments"], "no engine of ours is started"
        found = loop_evaluate(session)
        again = session_of(tmp_path / "store", small_engine.url, "two", supervisor, api_key_variable="ANOTHER")
        other = session_of(tmp_path / "store", small_engine.url, "three", supervisor, model="another")
        assert not any(piece.computed for piece in plan_work(again.context, NOTHING)), "the same model is the same work"
        assert [each.stage for each in plan_work(other.context, NOTHING) if each.computed] == ["rollout"]
    (score,) = found["scores"]
    store = session.context.store
    (entry,) = [each for each in store.ledger.entries(run="one", stage="rollout") if not each.part]
    traces = store.read(entry.slices("traces")).to_pylist()
    assert score["errors"] == {} and score["num_attempts"] == 4 == len(traces), [t["error_message"] for t in traces]
    assert score["average"] is not None and score["num_turns"] == 4
    messages = store.read(entry.slices("messages")).to_pylist()
    assert all(row["token_ids"] == [] and row["logprobs"] == [] for row in messages), "there is nothing to train on"
    for trace in traces:
        calls = json.loads(trace["record"])["calls"]
        assert trace["policy_key"] == "" and trace["num_output_tokens"] == calls[0]["usage"]["completion_tokens"] > 0
        assert trace["num_input_tokens"] == calls[0]["usage"]["prompt_tokens"] > 0
    assert score["num_tokens"] == sum(each["num_input_tokens"] + each["num_output_tokens"] for each in traces)
    assert KEY not in json.dumps([traces, messages], default=str)

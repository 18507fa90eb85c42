"""Rows made of plain data are those that verifiers' models give, and the models see what only they know."""

import asyncio
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.inference.trace_rows.rows import RolloutOrigin, rows_of_plain_trace, rows_of_trace, trace_tables
from tests.fixtures.shapes import NOTES, NUMBERS, SCRIPT, URLS, Player, blank, streamed

pytestmark = pytest.mark.engine

ORIGIN = RolloutOrigin({"assignment_id": "g/0", "group_id": "g", "environment": "e", "example_id": "x"}, "p", 0, 0, 1.0)
REPLY: dict[str, Any] = {"content": "yes", "reasoning_content": None, "calls": []}
OPENING = [("asks", "what?", REPLY)]
FEW = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def served(script: list[Any], task: dict[str, Any] | None = None, **changes: Any) -> list[dict[str, Any]]:
    """A trace in both forms in which a server sends one: change by change, and whole."""
    from verifiers.v1.serve.delta import dump, pack, unpack

    trace = blank("agent", **(task or {}))
    player = Player(trace)

    def finish() -> None:
        for name, value in changes.items():
            setattr(trace, name, value)

    episode = asyncio.run(streamed([trace], [*(partial(player.move, *move) for move in script), finish]))
    return [*episode["traces"], unpack(pack(dump(trace)))]


def tables(made: tuple[dict[str, Any], list[dict[str, Any]]]) -> dict[str, pa.Table]:
    row, messages = made
    return trace_tables([row], messages)


def check(trace: dict[str, Any]) -> pa.Table:
    """Both ways give equal tables, and none changes the trace; return the traces table."""
    from verifiers.v1.trace import WireTrace

    before = repr(trace)
    plain = tables(rows_of_plain_trace(trace, ORIGIN, "episode"))
    assert repr(trace) == before
    typed = tables(rows_of_trace(WireTrace.model_validate(trace), ORIGIN, "episode"))
    assert plain.keys() == typed.keys()
    for name, rows in plain.items():
        assert rows.equals(typed[name]), [
            (a, b) for a, b in zip(rows.to_pylist(), typed[name].to_pylist(), strict=True)
        ]
    return plain["traces"]


@FEW
@given(SCRIPT, st.data())
def test_every_trace_gives_the_same_rows(script: list[Any], data: st.DataObject) -> None:
    from verifiers.v1.trace import Error, Reward

    changes = {
        "info": data.draw(NOTES),
        "metrics": {"m": data.draw(st.none() | NUMBERS | st.integers(0, 9))},
        "rewards": {"r": data.draw(st.none() | NUMBERS.map(lambda score: Reward(score=score, weight=0.5)))},
        "ok": data.draw(st.booleans()),
        "is_timeout": data.draw(st.booleans()),
        "stop_condition": data.draw(st.sampled_from([None, "max_turns", "agent_completed", "compaction_failed"])),
        "errors": data.draw(st.sampled_from([[], [Error(type="ProviderError", message="gone", status_code=503)]])),
    }
    for trace in served(script, {"picture": data.draw(URLS), "number": data.draw(NUMBERS)}, **changes):
        check(trace)


def chat_only(trace: dict[str, Any]) -> None:
    from verifiers.v1.configs.client import EvalClientConfig

    client = EvalClientConfig(base_url="http://x/v1", headers={"a": "secret"})
    trace["agent"]["config"]["client"] = client.model_dump()
    for node in trace["nodes"]:
        node |= {"token_ids": [], "mask": [], "is_content": [], "logprobs": []}


def cut_off(trace: dict[str, Any]) -> None:
    trace["calls"][-1]["finish_reason"] = "length"
    error = {"type": "E", "message": "m", "status_code": 500, "traceback": None}
    trace["calls"].append(trace["calls"][-1] | {"node": None, "error": error, "usage": None})


def lasting(trace: dict[str, Any]) -> None:
    trace["timing"]["agent"] |= {"start": 2.0, "end": 5.5}
    trace["timing"]["boot"] |= {"start": 2.0, "end": 1.0}
    trace["agent"]["config"]["sampling"] = {"temperature": 0.25, "seed": 3}


def without_numbers(trace: dict[str, Any]) -> None:
    trace["nodes"][-1]["logprobs"][0] = float("nan")


def with_tensors(trace: dict[str, Any]) -> None:
    array = {"__nd__": True, "dtype": "uint8", "shape": [1, 1, 1], "data": b"\x01"}
    trace["nodes"][-1] |= {"routed_experts": array, "sampling_mask": None}


def unknown_tool(trace: dict[str, Any]) -> None:
    trace["tools"][0]["parameters"] = {"limit": float("inf"), "data": b"text"}


@pytest.mark.parametrize("change", [chat_only, cut_off, lasting, without_numbers, with_tensors, unknown_tool])
def test_what_is_rare_gives_the_same_rows(change: Any) -> None:
    for trace in served(OPENING):
        change(trace)
        (row,) = check(trace).to_pylist()
        assert "secret" not in row["record"]


def test_usual_traces_take_no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from verifiers.v1.trace import WireTrace

    notes = {"text": b"\xff", "keys": {1: float("nan")}}
    traces = served(OPENING, info=notes, metrics={"m": 1})
    monkeypatch.setattr(WireTrace, "model_validate", None)
    for trace in traces:
        row, _ = rows_of_plain_trace(trace, ORIGIN, "episode")
        assert row["metrics"] == '{"m":1.0}' and row["info"] == '{"text":"/w==","keys":{"1":NaN}}'


def test_a_trace_of_another_build_is_completed() -> None:
    for trace in served(OPENING):
        trace["verifiers"] = {"version": "0.1.0"}
        del trace["is_timeout"], trace["calls"][0]["policy"]
        (row,) = check(trace).to_pylist()
        assert '"policy":null' in row["record"]

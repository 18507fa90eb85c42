"""Searching in what was said: text is text, in upper or lower case, and only the step's own messages are read."""

import json
from pathlib import Path

import pytest

from flows.queries.rollout_list import TraceChoice, choose
from flows.queries.rollout_search import run_rollouts, search_mask
from flows.queries.rollouts import traces
from flows.queries.store_reader import StoreReader
from tests.flows.viewer.hand_made import RUN
from tests.flows.viewer.looking import what_is_read
from tests.flows.viewer.stepped import SAID, stepped


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    broken = {"silent": {"error_class": "timeout", "error_type": "ReadTimeout", "error_message": "no [answer]\x1b[2J"}}
    return stepped(tmp_path_factory.mktemp("searched") / "store", **broken)


def holding(library: StoreReader, text: str, step: int = 0) -> list[str]:
    frame = traces(library, RUN, step)
    found = search_mask(library, RUN, frame, text)
    return choose(frame, TraceChoice(), found).rows["trace_id"].to_list()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("quick BROWN", ["plain"]),
        ("100%", ["percent"]),
        ("a.b", []),
        ("c.*d", ["percent"]),
        ("[e] (f)", ["percent"]),
        ("\\g ^h$", ["percent"]),
        ("'i' \"j\"", ["percent"]),
        ("ΟΔΌΣ", ["greek"]),
        ("οδος", ["greek"]),
        ("STRAßE", ["street"]),
        ("istanbul", ["street"]),
        ("<SCRIPT>", ["hostile"]),
        ("[bold red]\x1b", ["hostile"]),
        ("\u202e", ["hostile"]),
        ("\x00", ["hostile"]),
        ("first\nsecond", ["lines"]),
        ("later", []),
        ("E1", ["street", "hostile", "lines"]),
        ("G0", ["plain", "percent", "greek"]),
        ("readtimeout", ["silent"]),
        ("[ANSWER]\x1b[2j", ["silent"]),
    ],
)
def test_text_is_found_as_it_is_written(library: StoreReader, text: str, names: list[str]) -> None:
    assert holding(library, text) == names


MALFORMED = {"lines": '{"tool_calls": [{"na', "street": '{"reasoning_content": "\\ud800"}'}
CALL = {"id": "call_7", "type": "function", "name": "Calc", "arguments": '{"expression": "14-6 %"}'}


@pytest.mark.parametrize("sampled", [True, False])
def test_tool_calls_and_thoughts_are_searched(tmp_path: Path, sampled: bool) -> None:
    bodies = {"plain": {"tool_calls": [CALL]}, "greek": {"reasoning_content": "CALC or not", "tool_calls": None}}
    library = stepped(
        tmp_path / "store", {name: json.dumps(body) for name, body in bodies.items()} | MALFORMED, sampled
    )
    assert holding(library, "calc") == ["plain", "greek"]
    assert holding(library, "14-6 %") == ["plain"] and holding(library, "quick") == ["plain"]
    assert holding(library, '{"expression": "14') == ["plain"]
    replies = run_rollouts(library, RUN, {"trace_id", "reply"}).filter(trace_id="lines")["reply"]
    assert replies.to_list() == [SAID["lines"] if sampled else None]
    assert holding(library, "call_7") == holding(library, "reasoning_content") == holding(library, "function") == []


def test_how_many_hold_it_is_told_beside_how_many_were_chosen(library: StoreReader) -> None:
    frame = traces(library, RUN, 0)
    found = search_mask(library, RUN, frame, "e")
    chosen = choose(frame, TraceChoice(group="g0", search="e"), found)
    assert chosen.num_found == len(holding(library, "e")) > chosen.rows.height == 3
    frame = traces(library, RUN, 0)
    assert search_mask(library, RUN, frame, "") is None
    assert choose(frame, TraceChoice(), None).num_found is None
    half = search_mask(library, RUN, frame, "quick \ud800")  # half a letter, as a terminal may give it
    assert half is not None and half.sum() == 0


def test_only_this_steps_messages_are_read_once(library: StoreReader, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = StoreReader(library.store)
    frame = traces(fresh, RUN, 0)
    read = what_is_read(monkeypatch)
    assert search_mask(fresh, RUN, frame, "fox").sum() == 1
    assert {step for table, step in read if table == "messages"} == {0}
    num_reads = len(read)
    assert search_mask(fresh, RUN, frame, "fox").sum() == 1 and len(read) == num_reads

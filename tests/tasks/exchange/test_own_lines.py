"""Import of an export is identity: traces and messages of any shape come back column by column."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.schemas.stage_tables import MESSAGES, TRACES
from tasks.exchange.episodes import Reading, Row, compact
from tasks.exchange.own_lines import BLOCK, line_of, read_own
from tasks.exchange.placing import place
from tasks.exchange.problems import Unfit
from tests.builders import example, exchange, failed, message, trace
from tests.tasks.exchange.lines import ORIGIN

ASSIGNMENT = {"assignment_id": "3-1/2", "group_id": "3-1", "member": 2, "seed": 11}
ASSIGNMENT |= {"environment": "reverse", "example_id": "e0"}
MOMENTS = st.integers(0, 10**15).map(lambda micro: datetime.fromtimestamp(0, UTC) + timedelta(microseconds=micro))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
JSON = st.dictionaries(TEXTS, st.none() | st.integers() | st.floats(allow_nan=False) | TEXTS, max_size=3)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[list[Row], dict[str, list[Row]]]:
    """Draw the rows of an episode: traces with and without a record, messages or an error."""
    rows, messages = [], {}
    for number in range(draw(st.integers(1, 3))):
        name = f"t{number}"
        own = draw(nodes(name))
        record = {
            "task": {"type": "T", "data": {"idx": 1}},
            "extra": draw(JSON),
            "nodes": [{"timestamp": 1.5} for _ in own],
        }
        make = failed if draw(st.booleans()) else trace
        rows.append(
            make(
                name,
                episode_id="episode",
                assignment_id=ASSIGNMENT["assignment_id"],
                group_id=ASSIGNMENT["group_id"],
                reward=draw(st.none() | st.floats(allow_nan=False)),
                temperature=draw(st.floats(0, 2, width=32)),
                started_at=draw(MOMENTS),
                **{column: compact(draw(JSON)) for column in ("rewards", "metrics", "info")},
                record=compact(record | draw(JSON.map(lambda extra: {"extra": extra})))
                if draw(st.booleans())
                else "{}",
            )
        )
        messages[name] = own
    return rows, messages


@st.composite
def nodes(draw: st.DrawFn, name: str) -> list[Row]:
    """Draw messages of a graph; bodies may be spelt in ways that no dump of ours would."""
    rows: list[Row] = []
    for number in range(draw(st.integers(0, 4))):
        sampled = draw(st.booleans())
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))
        text = draw(TEXTS)
        role = "assistant" if sampled else "user"
        body = draw(
            st.sampled_from(["{}", compact({"role": role, "content": text}), '{"role": "user",  "content": null}'])
        )
        scores = [draw(st.floats(-90, 0, width=32)) if sampled else 0.0 for _ in tokens]
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        rows.append(
            message(
                name, number, parent=parent, tokens=tokens, sampled=sampled, logprobs=scores, body=body, content=text
            )
        )
    return rows


def there_and_back(rows: list[Row], messages: dict[str, list[Row]]) -> tuple[pa.Table, pa.Table]:
    """Export an episode, spell it as JSON, and import it again."""
    task = example() | {"task": '{"prompt":"x"}'}
    line = json.loads(compact(line_of("run", 3, rows, messages, ASSIGNMENT, task)))
    found = place([read_own(line, ORIGIN, Reading())])
    assert found.assignments(3).to_pylist() == [ASSIGNMENT] and found.examples().to_pylist() == [task]
    return found.traces(3), found.messages(3)


@settings(max_examples=20)
@given(episodes())
def test_rows_come_back_as_they_were(episode: tuple[list[Row], dict[str, list[Row]]]) -> None:
    rows, messages = episode
    traces, said = there_and_back(rows, messages)
    assert traces.equals(pa.Table.from_pylist(rows, schema=TRACES.arrow))
    flat = [row for name in messages for row in messages[name]]
    assert said.equals(pa.Table.from_pylist(flat, schema=MESSAGES.arrow))


def test_the_line_is_one_that_verifiers_knows() -> None:
    rows = [trace("t0", policy_version=3, reward=0.5)]
    line = line_of("run", 3, rows, {"t0": exchange("t0")}, ASSIGNMENT, example())
    assert line["run"]["work"] == {"type": "train", "step": 3, "policy": {"start": 3, "end": 3}}
    assert line["group"] == {"id": "3-1"} and line["ok"]
    (only,) = line["traces"]
    assert [node["token_ids"] for node in only["nodes"]] == [[1, 2, 3], [4, 5]]
    assert only["nodes"][1]["logprobs"] == [-1.0, -1.0] and only["nodes"][0]["logprobs"] == []


def test_a_rollout_without_a_trace_is_an_error_of_its_episode() -> None:
    line = line_of("run", 0, [failed("t0")], {}, ASSIGNMENT, example())
    assert not line["ok"] and line["traces"] == [] and line["errors"][0]["type"] == "TimeoutError"
    traces, _ = there_and_back([failed("t0", assignment_id="3-1/2", group_id="3-1")], {})
    assert traces["error_class"].to_pylist() == ["timeout"]


def spoilt(change: str, value: Any) -> dict[str, Any]:
    """Return a line whose block was changed."""
    line = json.loads(compact(line_of("run", 3, [trace("t0")], {"t0": exchange("t0")}, ASSIGNMENT, example())))
    line[BLOCK][change] = value
    return line


@pytest.mark.parametrize(
    ("change", "value"), [("version", 2), ("assignment", {}), ("example", None), ("traces", []), ("step", "3")]
)
def test_a_block_that_is_not_whole_is_refused(change: str, value: Any) -> None:
    with pytest.raises(Unfit, match="block `stagecoach`"):
        read_own(spoilt(change, value), ORIGIN, Reading())


def test_a_block_that_names_another_trace_is_refused() -> None:
    line = spoilt("step", 3)
    line["traces"][0]["id"] = "other"
    with pytest.raises(Unfit, match="do not fit"):
        read_own(line, ORIGIN, Reading())

"""Parse errors: each rollout is found with its own turns, in whatever order the messages lie."""

import json

from tasks.filtering.stage import STAGE, filtering
from tests.fixtures.builders import message, table, trace, view


def talk(trace_id: str) -> list[dict[str, object]]:
    """A question and two answers of one and two tokens."""
    return [
        message(trace_id, 0),
        message(trace_id, 1, parent=0, tokens=(4,), sampled=True),
        message(trace_id, 2, parent=1, tokens=(7, 8), sampled=True),
    ]


def test_each_rollout_is_found_with_its_own_turns() -> None:
    flags = {"a": [2], "b": [], "c": [1, 2], "d": [1], "asked": [0]}
    traces = [trace(name, info=json.dumps({"parse_errors": numbers})) for name, numbers in flags.items()]
    rows = [talk(name) for name in flags]
    mixed = [each[number] for number in (1, 0, 2) for each in reversed(rows)]
    tables = {"traces": table("traces", traces), "messages": table("messages", mixed)}
    filters = [{"type": "errored"}, {"type": "parse_error"}]
    found = filtering(tables, view(STAGE, filtering={"filters": filters}), quarantined={})["verdicts"].to_pylist()
    assert [json.loads(row["evidence"]).get("parse_error") for row in found] == [
        {"messages": [2], "tokens": 2},
        None,
        {"messages": [1, 2], "tokens": 3},
        {"messages": [1], "tokens": 1},
        None,  # what was asked is no turn of the policy
    ]

"""A small step written row by row, whose messages say what a test wants: for pages, searches and terminals."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.queries.store_reader import StoreReader
from storage.refs import Entry
from tests.fixtures.builders import message, table, trace
from tests.flows.viewer.hand_made import NOW, RUN, HandMade

HOSTILE = "<script>alert(1)</script>[bold red]\x1b[31mred\u202eafter\x00"
SAID = {
    "plain": "The quick brown fox",
    "percent": "100% of a_b, c.*d [e] (f) \\g ^h$ 'i' \"j\"",
    "greek": "ΟΔΟΣ και οδός",
    "street": "Straße, ISTANBUL, İstanbul",
    "hostile": HOSTILE,
    "lines": "first\nsecond\ttab",
    "silent": "",
}
"""What each trace's message says, by the trace's id."""
PARTLY = "70617274" * 4
"""The key of the work that is not finished."""
__all__ = ["HOSTILE", "PARTLY", "RUN", "SAID", "begun", "stepped"]


def stepped(
    root: Path, bodies: Mapping[str, str] | None = None, sampled: bool = True, **changes: Mapping[str, Any]
) -> StoreReader:
    """Write a step of a trace for each of SAID, and another step with another.

    `changes` are columns of a trace by its id, `bodies` those of its second message, which the policy `sampled`.
    """
    made = HandMade(root)
    traces = [
        trace(
            name, **{"group_id": f"g{at // 3}", "reward": at / 10, "example_id": f"e{at // 3}", **changes.get(name, {})}
        )
        for at, name in enumerate(SAID)
    ]
    given = bodies or {}
    messages = [message(name, 0, content=None) for name in SAID]
    messages += [
        message(name, 1, content=text, body=given.get(name, "{}"), sampled=sampled and name in given)
        for name, text in SAID.items()
    ]
    made.step(traces, messages)
    made.step([trace("later")], [message("later", 0, content="The quick later fox")], step=1)
    return StoreReader.at(root)


def begun(root: Path, parts: int) -> StoreReader:
    """Write a step of which only some parts are done, of two traces each; more can be added by calling it again."""
    made = HandMade(root)
    done = {entry.part for entry in made.store.ledger.entries(run=RUN)}
    for part in sorted({f"p{n}" for n in range(parts)} - done):
        rows = table("traces", [trace(f"{part}-{member}", group_id=part, reward=None) for member in range(2)])
        attempt = f"attempt-{part}"
        piece = made.store.append("traces", rows, run=RUN, step=0, key=PARTLY, attempt=attempt)
        entry = Entry(RUN, 0, "rollout", 1, PARTLY, part, attempt, {}, {}, (piece,), NOW, NOW)
        made.store.ledger.commit(entry)
    return StoreReader.at(root)

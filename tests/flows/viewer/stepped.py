"""A small step written row by row, whose messages say what a test wants: for pages, searches and terminals."""

from tests.fixtures.builders import message, trace
from tests.flows.viewer.hand_made import RUN, HandMade

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


def stepped(root, **changes):
    """Write a step of a trace for each of SAID, and another step with another; `changes` are columns by trace."""
    made = HandMade(root)
    traces = [
        trace(
            name, **{"group_id": f"g{at // 3}", "reward": at / 10, "example_id": f"e{at // 3}", **changes.get(name, {})}
        )
        for at, name in enumerate(SAID)
    ]
    messages = [message(name, 0, content=None) for name in SAID]
    made.step(traces, messages + [message(name, 1, content=text) for name, text in SAID.items()])
    made.step([trace("later")], [message("later", 0, content="The quick later fox")], step=1)
    return made.reader


def begun(root, parts):
    """Write a step of which only some parts are done, of two traces each; more can be added by calling it again."""
    made = HandMade(root)
    done = {entry.part for entry in made.store.ledger.entries(run=RUN)}
    for part in sorted({f"p{n}" for n in range(parts)} - done):
        rows = [trace(f"{part}-{member}", group_id=part, reward=None) for member in range(2)]
        made.work("rollout", {"traces": rows}, part=part)
    return made.reader

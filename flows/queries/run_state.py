"""The state of a run in a word, from its events and its process."""

import socket
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from flows.queries.store_reader import StoreReader
from flows.services.ownership import live_processes, writer_alive
from storage.records import LOST, STARTS, Event


def process_gone(event: Event) -> bool:
    """Say whether a run that is said to be going has no process any more; False where that cannot be seen from here."""
    # A process id means nothing on another machine.
    if event.event not in STARTS or event.host != socket.gethostname():
        return False
    return not writer_alive(event)


def deciding_event(events: Sequence[Event]) -> Event:
    """Return the event that decides the state of a run, out of all of its events in order.

    It is the last one, or the start of a process of this machine that still works while another one has ended.
    """
    working = [event for event in live_processes(events) if event.host == socket.gethostname()]
    return events[-1] if events[-1].event in STARTS else max(working, key=lambda event: event.at, default=events[-1])


GONE = "its process is gone"
GOOD = ("finished",)
CALM = ("interrupted", "evicted", "cancelled", "removed", LOST)
"""Ends that somebody or something chose; what was done by then is kept."""


def state_of(event: Event) -> dict[str, Any]:
    """Return the last event of a run as plain values: `state` in a word, `look` (good, bad, warn, going), `message`."""
    if event.event in STARTS:
        gone = process_gone(event)
        return {"state": GONE if gone else "going", "look": "warn" if gone else "going", "message": event.message}
    return {"state": event.event, "look": look_of(event.event), "message": event.message}


def look_of(event: str) -> str:
    """Return how an event is to be taken: good, bad, warn, or going where the run goes on."""
    if event in STARTS:
        return "going"
    return "good" if event in GOOD else "warn" if event in CALM else "bad"


def is_going(event: Event) -> bool:
    """Say whether a run may still get further."""
    return event.event in STARTS and not process_gone(event)


def any_going(reader: StoreReader, *runs: str) -> bool:
    """Say whether any of some runs may still get further, as far as can be seen from here."""
    return any(is_going(deciding_event(reader.store.runs.events(run))) for run in runs)


def count_lost_services(lost: Sequence[Event]) -> dict[str, int]:
    """Return how often each service of a run was lost, by its name, which the messages of these events begin with."""
    return dict(Counter(event.message.partition(": ")[0] for event in lost))


def seconds_at_work(events: Sequence[Event], last_work: datetime | None) -> float:
    """Return the wall-clock of a run without the time between an end and a resumption.

    A run that is going, or whose process is gone, counts up to the last work that it finished.
    """
    total = 0.0
    for event, later in zip(events, (*events[1:], None), strict=True):
        if event.event not in STARTS:
            continue
        # A start after a start: the process died without an event, and its last work alone says how far it came.
        until = last_work if later is None or later.event in STARTS else later.at
        if later is not None and until is not None:
            until = min(until, later.at)
        total += max(0.0, (until - event.at).total_seconds()) if until else 0.0
    return total

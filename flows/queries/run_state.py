"""The state of a run in a word, from its events and its process; and its recorded warnings."""

import re
import socket
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from flows.queries.store_reader import StoreReader
from flows.services.ownership import live_processes, writer_alive
from storage.records import SERVICE_EVENTS, STARTS, WARNING, Event, Runs
from tasks.metrics.warnings import Hit

GONE = "its process is gone"
CALM = ("interrupted", "evicted", "cancelled", "removed", *SERVICE_EVENTS)
"""Ends that somebody or something chose; what was done by then is kept."""


def process_gone(event: Event) -> bool:
    """Return whether a run that started has no process any more; False where that cannot be seen from here."""
    # A process id means nothing on another machine.
    return event.event in STARTS and event.host == socket.gethostname() and not writer_alive(event)


def deciding_event(events: Sequence[Event]) -> Event:
    """Return the event that decides the state of a run, out of all of its events in order.

    It is the last one, or the start of a process of this machine that still works while another one has ended.
    """
    working = [event for event in live_processes(events) if event.host == socket.gethostname()]
    return events[-1] if events[-1].event in STARTS else max(working, key=lambda event: event.at, default=events[-1])


def state_of(event: Event) -> dict[str, Any]:
    """Return the last event of a run as plain values: `state` in a word, `look` (good, bad, warn, going), `message`."""
    if process_gone(event):
        return {"state": GONE, "look": "warn", "message": event.message}
    state = "going" if event.event in STARTS else event.event
    return {"state": state, "look": look_of(event.event), "message": event.message}


def look_of(event: str) -> str:
    """Return how an event is to be taken: good, bad, warn, or going where the run goes on."""
    if event in STARTS:
        return "going"
    return "good" if event == "finished" else "warn" if event in CALM else "bad"


def is_going(event: Event) -> bool:
    """Return whether a run may still get further."""
    return event.event in STARTS and not process_gone(event)


def any_going(reader: StoreReader, *runs: str) -> bool:
    """Return whether any of some runs may still get further, as far as can be seen from here."""
    return any(is_going(deciding_event(reader.store.runs.events(run))) for run in runs)


def count_lost_services(lost: Sequence[Event]) -> dict[str, int]:
    """Return how often each service of a run was lost, by its name, which the messages of these events begin with."""
    return dict(Counter(event.message.partition(": ")[0] for event in lost))


_WARNING = re.compile(r"(?P<rule>\w+): (?P<text>.*?)( \[where (?P<where>.*)\])?", re.DOTALL)


def warning_message(hit: Hit) -> str:
    """Return the message of the event that records a warning; `recorded_warnings` reads it."""
    return f"{hit.rule}: {hit.text}" + (f" [where {hit.where}]" if hit.where else "")


def recorded_warnings(runs: Runs, run: str) -> list[dict[str, Any]]:
    """Return the warnings of a run, each once, the earliest first: rule, step, text, and `where` as `Hit` has it."""
    events = sorted({(event.step, event.message) for event in runs.service_events(run) if event.event == WARNING})
    read = [(step, message) for step, text in events if (message := _WARNING.fullmatch(text))]
    return [{"step": step, **message.groupdict(default="")} for step, message in read]


def seconds_at_work(events: Sequence[Event], last_work: datetime | None) -> float:
    """Return the wall-clock of a run without the time between an end and a resumption.

    A run that is going, or whose process is gone, counts up to the last work that it finished.
    """
    total = 0.0
    for event, later in zip(events, (*events[1:], None), strict=True):
        # A start after a start: the process died without an event, and its last work alone says how far it came.
        until = last_work if later is None or later.event in STARTS else later.at
        if event.event in STARTS and until is not None:
            until = min(until, later.at) if later else until
            total += max(0.0, (until - event.at).total_seconds())
    return total

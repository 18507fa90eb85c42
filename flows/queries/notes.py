"""Notes and tags of people on runs and rollouts, as plain values."""

from typing import Any

import polars as pl

from storage.records import REMOVED
from storage.store import Store


def notes_of(store: Store, run: str = "", trace_id: str | None = None) -> list[dict[str, Any]]:
    """Return notes in order of time: note (its id), run, trace_id, tags, text and at.

    Those on a run have no trace. A note on a rollout is on it in every run that uses it. Of a named run they are those
    written since a run of that name was last removed: an older note is about the work that is gone.
    """
    events = store.runs.events(run) if run in store.runs.names() else []
    removed_at = max((each.at for each in events if each.event == REMOVED), default=None)
    return [
        {"note": each.note, "run": each.run, "trace_id": each.trace_id or None}
        | {"tags": list(each.tags), "text": each.text, "at": each.at}
        for each in store.notes.all(run, trace_id)
        if removed_at is None or each.at > removed_at
    ]


def search_notes(store: Store, run: str, text: str) -> list[dict[str, Any]]:
    """Return the notes on a run itself whose text or tags hold a text, in any case; see `notes_of`."""
    said = text.strip("\"'").lower()
    return [each for each in notes_of(store, run, "") if said in " ".join([each["text"], *each["tags"]]).lower()]


ROLLOUT_NOTES: dict[str, Any] = dict.fromkeys(("trace_id", "note", "tags"), pl.String)


def notes_of_rollouts(store: Store) -> pl.DataFrame:
    """Return one row for each rollout with a note: trace_id, note (its texts) and tags, a space between them."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for each in store.notes.all():
        if each.trace_id:
            texts, tags = found.setdefault(each.trace_id, ([], []))
            texts += [each.text] if each.text else []
            tags += [tag for tag in each.tags if tag not in tags]
    rows = [(name, "\n".join(texts), " ".join(tags)) for name, (texts, tags) in found.items()]
    return pl.DataFrame(rows, ROLLOUT_NOTES, orient="row")


def note_line(each: dict[str, Any]) -> str:
    """Return a note as one line of a terminal."""
    tags = "".join(f" #{tag}" for tag in each["tags"])
    return f"note {each['note']}, {str(each['at'])[:16].replace('T', ' ')}: {each['text']}{tags}"

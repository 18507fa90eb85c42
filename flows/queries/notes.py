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


ROLLOUT_NOTES: dict[str, Any] = dict.fromkeys(("trace_id", "note", "tags"), pl.String)


def notes_of_rollouts(store: Store) -> pl.DataFrame:
    """Return one row for each rollout with a note: trace_id, note (its texts) and tags, a space between them."""
    notes = [(note.trace_id, note.text or None, note.tags) for note in store.notes.all() if note.trace_id]
    rows = pl.DataFrame(notes, ROLLOUT_NOTES | {"tags": pl.List(pl.String)}, orient="row")
    tags = pl.col("tags").explode().unique(maintain_order=True).drop_nulls()
    texts = {"note": pl.col("note").str.join("\n"), "tags": tags.str.join(" ")}
    return rows.group_by("trace_id", maintain_order=True).agg(**texts)


def note_line(note: dict[str, Any]) -> str:
    """Return a note as one line of a terminal."""
    tags = "".join(f" #{tag}" for tag in note["tags"])
    return f"note {note['note']}, {str(note['at'])[:16].replace('T', ' ')}: {note['text']}{tags}"

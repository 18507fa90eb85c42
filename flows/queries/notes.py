"""Notes and tags of people on runs and rollouts, as plain values."""

from typing import Any

import polars as pl

from storage.store import Store


def notes_of(store: Store, run: str = "", trace_id: str | None = None) -> list[dict[str, Any]]:
    """Return notes in order of time: note (its id), run, trace_id, tags, text and at.

    Those on a run have no trace. A note on a rollout is on it in every run that uses it.
    """
    return [
        {"note": each.note, "run": each.run, "trace_id": each.trace_id or None}
        | {"tags": list(each.tags), "text": each.text, "at": each.at}
        for each in store.notes.all(run, trace_id)
    ]


def notes_of_rollouts(store: Store) -> pl.DataFrame:
    """Return one row for each rollout with a note: trace_id, note (its texts) and tags, a space between them."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for each in store.notes.all():
        if each.trace_id:
            texts, tags = found.setdefault(each.trace_id, ([], []))
            texts += [each.text] if each.text else []
            tags += [tag for tag in each.tags if tag not in tags]
    rows = [(name, "\n".join(texts), " ".join(tags)) for name, (texts, tags) in found.items()]
    return pl.DataFrame(rows, dict.fromkeys(("trace_id", "note", "tags"), pl.String), orient="row")


def note_line(each: dict[str, Any]) -> str:
    """Return a note as one line of a terminal."""
    tags = "".join(f" #{tag}" for tag in each["tags"])
    return f"note {each['note']}, {str(each['at'])[:16].replace('T', ' ')}: {each['text']}{tags}"

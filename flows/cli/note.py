"""The command note: notes and tags of people on runs and rollouts."""

import json
import re
from typing import Annotated

from configs.store import default_store
from flows.cli.arguments import Json, StoreOption, UsageError, option
from flows.queries.notes import note_line, notes_of
from flows.queries.store_reader import StoreReader, recorded_run
from flows.queries.trace import find_trace
from flows.reporting.formats import say
from storage.store import open_store

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")


def note(
    run: Annotated[str, option("the run, `latest` for the newest", "RUN")],
    text: Annotated[str, option("what to write; without it and without a tag, the notes are listed", "TEXT")] = "",
    /,
    *,
    trace: Annotated[str, option("the rollout that it is on; its first characters are enough", "ID")] = "",
    tag: Annotated[tuple[str, ...], option("a tag: letters, digits, _ . : -; may be given several times")] = (),
    delete: Annotated[str, option("take back the note of this id", "NOTE")] = "",
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Record, take back or list notes.

    Raises RunUnknown, NotThere for an unknown rollout, NoteUnknown, UsageError for options that do not fit together.
    """
    if delete and (text or tag or trace):
        raise UsageError("--delete takes a note back: give it alone, with the run")
    if wrong := [name for name in tag if not TAG.fullmatch(name)]:
        raise UsageError(f"--tag {wrong[0]!r}: a tag is of letters, digits and _ . : -, 64 at most")
    # Opened to be read first: a wrong address must not become a new store.
    reader = StoreReader.at(store or default_store())
    name, _ = recorded_run(reader.store, run)
    trace_id = find_trace(reader, name, trace).trace_id if trace else ""
    written = []
    if delete or text or tag:
        root = open_store(reader.store.root.address)
        one = root.notes.delete(delete) if delete else root.notes.record(name, text, tags=tag, trace_id=trace_id)
        written = [one.note]
    notes = notes_of(reader.store, name, trace_id or None)
    if as_json:
        print(json.dumps({"written": written, "notes": notes}, default=lambda moment: moment.isoformat()))
        return 0
    if written:
        say(f"note {written[0]} {'was taken back' if delete else 'is written'}")
        return 0
    for row in notes:
        say(f"{note_line(row)}{' (rollout ' + row['trace_id'] + ')' if row['trace_id'] else ''}")
    if not notes:
        say(f"{name} has no notes")
    return 0

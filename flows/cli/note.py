"""The command note: notes and tags of people on runs and rollouts."""

import re
from typing import Annotated, Any

from flows.cli.arguments import Json, StoreOption, UsageError, option, stored_run
from flows.cli.output import print_report
from flows.reporting.formats import say

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

    Raises RunUnknown, NotThere for an unknown rollout, StoreError, UsageError for options that do not fit together.
    """
    from flows.queries.notes import notes_of
    from flows.queries.trace import find_trace
    from storage.store import open_store

    if delete and (text or tag or trace):
        raise UsageError("--delete takes a note back: give it alone, with the run")
    if wrong := [name for name in tag if not TAG.fullmatch(name)]:
        raise UsageError(f"--tag {wrong[0]!r}: a tag is of letters, digits and _ . : -, 64 at most")
    reader, name, _ = stored_run(store, run)  # a wrong address must not become a new store
    trace_id = find_trace(reader, name, trace).trace_id if trace else ""
    report: dict[str, Any] = {}
    if delete or text or tag:
        notes = open_store(reader.store.root.address).notes
        row = notes.delete(delete) if delete else notes.record(name, text, tags=tag, trace_id=trace_id)
        report["deleted" if delete else "written"] = row.note
    report["notes"] = notes_of(reader.store, name, trace_id or None)
    print_report(report, as_json)
    if not (report["notes"] or as_json):
        say(f"{name} has no notes")
    return 0

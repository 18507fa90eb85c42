"""The schemas of the tables that no stage writes: ledger, runs, quarantines, expired slices, notes."""

import pyarrow as pa

from storage.schemas.contract import MOMENT, NAMES, Column, Table, list_of, struct_of

FILE = struct_of(path=pa.string(), size=pa.int64(), sha256=pa.string())
SLICE = struct_of(
    table=pa.string(), run=pa.string(), attempt=pa.string(), rows=pa.int64(), digest=pa.string(), files=list_of(FILE)
)
INPUT = struct_of(name=pa.string(), key=pa.string())

LEDGER = Table(
    "ledger",
    "one finished piece of work as a run uses it, or one finished part of a stage that commits in parts",
    ("run", "key", "part"),
    (
        Column("run", pa.string(), "the run that uses it; its slices say which run computed it; the only partition"),
        Column("step", pa.int64(), "the step"),
        Column("stage", pa.string(), "the stage's name"),
        Column("stage_version", pa.int32(), "the stage's version"),
        Column("key", pa.string(), "the key of the work"),
        Column("part", pa.string(), "empty for the whole; else the name of a committed part"),
        Column("attempt", pa.string(), "the attempt that finished"),
        Column("section", pa.string(), "the config section in the key, as canonical JSON"),
        Column("inputs", list_of(INPUT), "the keys that went in, by name"),
        Column("outputs", list_of(SLICE), "the slices made, files and digests included"),
        Column("started_at", MOMENT, "when the attempt began"),
        Column("finished_at", MOMENT, "when the outputs were safe"),
        Column("tokens", pa.int64(), "tokens handled; 0 where that means nothing"),
        Column("versions", pa.string(), "versions of the code and libraries at work, as JSON"),
    ),
)
RUNS = Table(
    "runs",
    "one event in the life of a run",
    ("run", "event", "at"),
    (
        Column("run", pa.string(), "the run; the only partition"),
        Column(
            "event",
            pa.string(),
            "started, resumed, finished, failed, interrupted, evicted, refused, cancelled, crashed or removed; "
            "or lost, of a service of the run that ended unasked",
        ),
        Column("at", MOMENT, "when, but never before an event that was committed earlier"),
        Column("kind", pa.string(), "train, sft, evaluate or replay"),
        Column("config", pa.string(), "the resolved config as JSON; secrets never"),
        Column("parent_run", pa.string(), "the run this one branches off", True),
        Column("step", pa.int64(), "the step the event speaks of"),
        Column(
            "message",
            pa.string(),
            "where it did not end well: what happened, what is safe; of a loss: which service, its end, which restart; "
            "of a start or resumption: `process BOOT_ID:PID:START_TICKS`",
        ),
        Column("flow_run", pa.string(), "the Prefect flow run", True),
        Column("host", pa.string(), "where the run ran"),
        Column("pid", pa.int64(), "the process"),
    ),
)
QUARANTINES = Table(
    "quarantines",
    "rollouts that were found to be unfit for training after they were made; one row is one finding",
    ("quarantine",),
    (
        Column("run", pa.string(), "the run whose rollouts were looked at, or `all-runs`; the only partition"),
        Column("quarantine", pa.string(), "the finding's id: a digest of its rollouts and its reason"),
        Column("where", pa.string(), "the condition that found them, in SQL over traces"),
        Column("reason", pa.string(), "why they are unfit"),
        Column("trace_ids", NAMES, "the rollouts, sorted"),
        Column("at", MOMENT, "when"),
        Column("host", pa.string(), "where it was said"),
    ),
)
# The name is the directory's in stores that exist.
EXPIRED_SLICES = Table(
    "retirements",
    "one slice whose rows were dropped because of their age; the ledger still names it",
    ("run", "table", "attempt"),
    (
        Column("run", pa.string(), "the run that computed the rows; the only partition"),
        Column("table", pa.string(), "the table"),
        Column("attempt", pa.string(), "the attempt that made the rows"),
        Column("rows", pa.int64(), "how many there were"),
        Column("bytes", pa.int64(), "size of their files as first written"),
        Column("at", MOMENT, "when they were given up"),
        Column("hours", pa.int64(), "the age in hours from which on rows were dropped"),
    ),
)

NOTES_TABLE = Table(
    "notes",
    "one note of a person on a run or on a rollout, or that a note was taken back",
    ("run", "note", "deleted"),
    (
        Column("run", pa.string(), "the run; the only partition"),
        Column("note", pa.string(), "the note's id"),
        Column("trace_id", pa.string(), "the rollout; empty where it is on the run"),
        Column("tags", NAMES, "its tags, sorted"),
        Column("text", pa.string(), "what it says"),
        Column("deleted", pa.bool_(), "whether this row takes the note back"),
        Column("at", MOMENT, "when"),
        Column("host", pa.string(), "where it was written"),
    ),
)

SYSTEM_TABLES = (LEDGER, RUNS, QUARANTINES, EXPIRED_SLICES, NOTES_TABLE)
"""Rows of these count as soon as they are committed; rows of stage tables count when the ledger names them."""

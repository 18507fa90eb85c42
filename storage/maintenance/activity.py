"""Which runs may be at work: what housekeeping must not take anything from."""

from datetime import UTC, datetime, timedelta

from storage.runs import REMOVED
from storage.store import Store

CLOSING = ("finished", "failed", "evicted", "refused", "cancelled", "crashed", REMOVED)
"""Events after which a run is not at work until it says `resumed`."""
QUIET_HOURS = 168
"""A run that said nothing for so long, in events or ledger, is taken for dead."""
RECENT_HOURS = 1.0
"""A run that finished less long ago is not removed unless it is named: someone may be about to branch off it."""


def at_work(store: Store) -> list[str]:
    """The runs whose last event opens work, and that gave a sign of life within QUIET_HOURS; in order of name."""
    oldest = datetime.now(UTC) - timedelta(hours=QUIET_HOURS)
    return sorted(
        run
        for run in store.runs.names()
        if store.runs.events(run)[-1].event not in CLOSING and last_sign(store, run) > oldest
    )


def last_sign(store: Store, run: str) -> datetime:
    """When a run last said something: its newest event, or its newest row in the ledger."""
    moments = [entry.finished_at for entry in store.ledger.entries(run=run)]
    if last := store.runs.last(run):
        moments.append(last.at)
    return max(moments, default=datetime.fromtimestamp(0, UTC))


def unfinished(store: Store, run: str) -> bool:
    """Whether a run may go on: its last event says neither that it finished nor that it was removed."""
    last = store.runs.last(run)
    return last is not None and last.event not in ("finished", REMOVED)


def why_protected(store: Store, run: str) -> str | None:
    """Why a run is removed only when it is named: it did not finish, or just did; None where nothing speaks for it."""
    last = store.runs.last(run)
    if last is None:
        return None
    if unfinished(store, run):
        return f"its last event is {last.event!r}"
    if last.event == "finished" and datetime.now(UTC) - last.at < timedelta(hours=RECENT_HOURS):
        return f"it finished less than {RECENT_HOURS:g} h ago"
    return None

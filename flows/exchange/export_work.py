"""Which work made the rollouts that are exported, and whose rewards and verdicts count where runs share it."""

from collections.abc import Sequence
from dataclasses import dataclass

from flows.exchange.drafts import ExportRefused
from flows.recorded import SAMPLING
from storage.refs import Entry
from storage.store import Store


@dataclass(frozen=True)
class Work:
    """Rollouts as one run has them."""

    sampled: Entry
    """What made the traces."""
    scored: Entry
    """What has the run's rewards: that of scoring the traces again, where the run did."""
    filtered: Entry | None
    """What has the run's verdicts; None where the run has not filtered them."""

    @property
    def run(self) -> str:
        """The run whose rewards and verdicts these are."""
        return self.sampled.run


def works(store: Store, run: str = "", held_out: bool = False) -> list[list[Work]]:
    """Return the finished work that made traces, each as the runs that share it have it; of one run, if it is named.

    Attempts at held-out examples are among it only if asked for.
    """
    found: dict[str, list[Work]] = {}
    for entry in store.ledger.entries(run=run or None):
        if entry.stage in SAMPLING and not entry.part and (held_out or "evaluation_assignment" not in entry.inputs):
            found.setdefault(entry.key, []).append(_work(store, entry))
    return list(found.values())


def only(ways: Sequence[Work], kept: bool) -> Work:
    """Return the way in which runs have certain rollouts, where they all agree: that of the run that computed them.

    `kept` asks that they agree on the verdicts as well. Raises ExportRefused where they differ.
    """
    filtered = [way for way in ways if kept and way.filtered] or ways
    told = {(way.scored.key, way.filtered.key if kept and way.filtered else "") for way in filtered}
    if len(told) > 1:
        what = "rewards or verdicts" if kept else "rewards"
        raise ExportRefused(
            f"the rollouts of step {ways[0].sampled.step} have other {what} in each of the runs "
            f"{', '.join(way.run for way in filtered)}. Nothing was written. Name the run whose {what} count "
            f"(stagecoach export RUN --sql ...), or let the question answer with the column `run` as well."
        )
    return next((way for way in filtered if any(piece.run == way.run for piece in way.sampled.outputs)), filtered[0])


def _work(store: Store, entry: Entry) -> Work:
    again = [e for e in store.ledger.entries(run=entry.run, stage="regrade") if entry.key in e.inputs.values()]
    scored = again[-1] if again else entry
    keys = {entry.key, scored.key}
    verdicts = [e for e in store.ledger.entries(run=entry.run, stage="filtering") if keys & set(e.inputs.values())]
    return Work(entry, scored, verdicts[-1] if verdicts else None)

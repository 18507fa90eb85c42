"""Rollouts in quarantine that a run found in the store and trains on: only a replay leaves such out, a run says so."""

import shlex

from flows.runtime.pipeline import StepBatch
from flows.runtime.session import Session


def kept_in_quarantine(session: Session, drawn: StepBatch) -> str:
    """Return a warning where the rollouts of a step were found, not sampled, and kept in spite of a quarantine.

    A run with the seed and settings of another shares its rollouts, and one that is resumed finds its own; both key
    their work by what was sampled, not by what was found out later. Empty where there is nothing to say.
    """
    if all(ref.computed for ref in drawn.traces):
        return ""  # what is new cannot have been found unfit
    place = session.place
    findings = place.store.quarantines.all()
    if not findings:
        return ""
    verdicts = place.table("verdicts", [drawn.filtering], ["trace_id", "keep"]).to_pylist()
    kept = {row["trace_id"] for row in verdicts if row["keep"]}
    touching = {each.quarantine: kept.intersection(each.trace_ids) for each in findings}
    unfit = frozenset().union(*touching.values())
    if not unfit:
        return ""
    return (
        f"step {drawn.packing.step}: {len(unfit)} of {len(kept)} rollouts that are trained on are in quarantine "
        f"({', '.join(name for name, traces in touching.items() if traces)}). They were found in the store. Leave them "
        f"out with: stagecoach replay {place.run} --from filtering --store {shlex.quote(place.config.store)}"
    )

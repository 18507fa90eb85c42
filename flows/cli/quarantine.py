"""The command quarantine: marks rollouts that turned out to be unfit for training, or lists the marks."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from configs.store import default_store
from flows.cli.arguments import Json, StoreOption, UsageError, option
from flows.reporting.formats import console, grid, say

if TYPE_CHECKING:
    from flows.cli.unfit_rollouts import BatchUse
    from storage.records import Quarantine


def quarantine(
    *,
    where: Annotated[
        str, option('condition in SQL over the columns of rollouts: "reward > 0.9"', allow_leading_hyphen=True)
    ] = "",
    reason: Annotated[str, option("why they are unfit; the verdicts of a replay contain it")] = "",
    run: Annotated[str, option("only the rollouts of this run")] = "",
    dry_run: Annotated[bool, option("print what would be marked; record nothing")] = False,
    listing: Annotated[bool, option("list the recorded quarantines", name="--list")] = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Record a quarantine and print the batches and policies that used its rollouts, or list all quarantines.

    Raises NoSuchRollouts for a condition that is none or matches nothing, RunUnknown for an unknown run.
    """
    from flows.cli.unfit_rollouts import search, uses
    from storage.records import ALL_RUNS
    from storage.store import open_store

    if not listing and not (where.strip() and (reason.strip() or dry_run)):
        raise UsageError("say which rollouts (--where) and why (--reason); --list shows what was marked before")
    root = open_store(store or default_store())
    if listing:
        _print_all(root.quarantines.all(), as_json)
        return 0
    trace_ids, looked_at = search(root, where, run)
    of_run = run or ALL_RUNS
    recorded = None if dry_run else root.quarantines.record(trace_ids, where=where, reason=reason, run=of_run)
    used = uses(root, trace_ids)
    if as_json:
        described = {
            "quarantine": recorded.quarantine if recorded else None,
            "run": of_run,
            "where": where,
            "reason": recorded.reason if recorded else reason,
            "num_rollouts": len(trace_ids),
            "num_looked_at": looked_at,
            "uses": [asdict(use) for use in used],
            "trace_ids": trace_ids,
        }
        print(json.dumps(described))
        return 0
    count = f"{len(trace_ids)} of {looked_at} rollouts"
    if recorded:
        say(f"quarantine {recorded.quarantine}: {count}: {recorded.reason}")
    else:
        say(f"{count} fit; nothing was recorded (--dry-run)")
    _print_uses(used)
    if used and recorded:
        # The run that was asked about knows its own rewards.
        replayed = used[0].run if of_run == ALL_RUNS else of_run
        say("Leave them out, for example:")
        say(f"  stagecoach replay {replayed} --from filtering --store {root.root.address}")
    return 0


def _print_uses(used: "Sequence[BatchUse]") -> None:
    if not used:
        say("No batch holds a sample of them.")
        return
    rows = [
        (
            *(use.run, use.step, use.batch[:8]),
            *("?" if count is None else count for count in (use.num_rows, use.num_samples, use.num_tokens)),
            "none" if use.version is None else f"{use.version} ({(use.policy or '')[:8]})",
            use.num_later,
        )
        for use in used
    ]
    headings = ("run", "step", "batch", "rows", "samples", "tokens", "policy made", "later ones")
    console().print(grid(headings, rows, left=(0, 1, 2)))
    for _, of_run in groupby(used, key=lambda use: use.run):
        say(_summary(list(of_run)))


def _summary(used: "Sequence[BatchUse]") -> str:
    """Return in a line what one run made of the rollouts."""
    made = [use.version for use in used if use.version is not None]
    samples, tokens = sum(use.num_samples or 0 for use in used), sum(use.num_tokens or 0 for use in used)
    text = f"run {used[0].run}: {samples} samples, {tokens} tokens in {len(used)} batches"
    if expired := sum(use.num_samples is None for use in used):
        text += f" ({expired} of them kept no longer: what they held is not known)"
    if not made:
        return f"{text}; no policy was trained on them"
    last = max((use.version or 0) + use.num_later for use in used)
    return f"{text}; policies {min(made)} to {last} were trained on them or come from one that was"


def _print_all(quarantines: "Sequence[Quarantine]", as_json: bool) -> None:
    if as_json:
        print(json.dumps([{**asdict(one), "at": one.at.isoformat()} for one in quarantines]))
        return
    rows = [
        (one.quarantine, f"{one.at:%Y-%m-%d %H:%M}", one.run, len(one.trace_ids), one.where, one.reason)
        for one in quarantines
    ]
    headings = ("quarantine", "at", "run", "rollouts", "where", "reason")
    console().print(grid(headings, rows, left=(0, 1, 2, 4, 5)) if quarantines else "no quarantines")

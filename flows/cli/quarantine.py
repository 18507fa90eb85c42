"""The command quarantine: marks rollouts that turned out to be unfit for training, or lists the marks."""

import shlex
from dataclasses import asdict
from typing import Annotated, Any

from configs.store import default_store
from flows.cli.arguments import Json, StoreOption, UsageError, option
from flows.cli.output import print_report
from flows.reporting.formats import say

SHOWN = 8
"""Characters of a key that are printed."""


def quarantine(
    *,
    where: Annotated[
        str, option('condition in SQL over the columns of rollouts: "reward > 0.9"', allow_leading_hyphen=True)
    ] = "",
    reason: Annotated[str, option("why they are unfit; the verdicts of a replay contain it")] = "",
    run: Annotated[str, option("only the rollouts of this run", "RUN")] = "",
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
    address = store or default_store()
    root = open_store(address)
    if listing:
        marks = [asdict(mark) for mark in root.quarantines.all()]
        counts = [mark | {"trace_ids": len(mark["trace_ids"])} for mark in marks]
        print_report({"quarantines": marks if as_json else counts}, as_json)
        if not (marks or as_json):
            say("no quarantines")
        return 0
    trace_ids, num_read = search(root, where, run)
    of_run = run or ALL_RUNS
    recorded = None if dry_run else root.quarantines.record(trace_ids, where=where, reason=reason, run=of_run)
    used = uses(root, trace_ids)
    report: dict[str, Any] = {
        **{"quarantine": recorded and recorded.quarantine, "run": of_run, "where": where},
        **{"reason": recorded.reason if recorded else reason, "num_rollouts": len(trace_ids)},
        **{"num_looked_at": num_read, "uses": used},
    }
    if as_json:
        print_report(report | {"trace_ids": trace_ids}, as_json)
        return 0
    shown = [use | {"batch": use["batch"][:SHOWN], "policy": (use["policy"] or "-")[:SHOWN]} for use in used]
    print_report(report | {"uses": shown})
    if not recorded:
        say("nothing was recorded (--dry-run)")
    if not used:
        say("No batch holds a sample of them.")
    elif recorded:
        # The run that the condition was about knows its own rewards.
        say("Leave them out, for example:")
        say(f"  stagecoach replay {run or used[0]['run']} --from filtering --store {shlex.quote(address)}")
    return 0

"""The command quarantine: marks rollouts that turned out to be unfit for training, or lists the marks."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from configs.store import default_store
from flows.cli.arguments import Json, StoreOption, UsageError, option
from flows.reporting.formats import console, grid, say

if TYPE_CHECKING:
    from flows.cli.unfit_rollouts import BatchUse

USE = ("run", "step", "batch", "rows", "samples", "tokens", "policy made", "later ones")
MARK = ("quarantine", "at", "run", "rollouts", "where", "reason")


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
        _print_marks([asdict(mark) for mark in root.quarantines.all()], as_json)
        return 0
    trace_ids, num_read = search(root, where, run)
    of_run = run or ALL_RUNS
    recorded = None if dry_run else root.quarantines.record(trace_ids, where=where, reason=reason, run=of_run)
    used = uses(root, trace_ids)
    if as_json:
        described = {
            **{"quarantine": recorded and recorded.quarantine, "run": of_run, "where": where},
            **{"reason": recorded.reason if recorded else reason, "num_rollouts": len(trace_ids)},
            **{"num_looked_at": num_read, "uses": [asdict(use) for use in used], "trace_ids": trace_ids},
        }
        print(json.dumps(described))
        return 0
    count = f"{len(trace_ids)} of {num_read} rollouts"
    if recorded:
        say(f"quarantine {recorded.quarantine}: {count}: {recorded.reason}")
    else:
        say(f"{count} fit; nothing was recorded (--dry-run)")
    if not used:
        say("No batch holds a sample of them.")
        return 0
    console().print(grid(USE, map(_use_row, used), left=(0, 1, 2)))
    if recorded:
        # The run that the condition was about knows its own rewards.
        say("Leave them out, for example:")
        say(f"  stagecoach replay {run or used[0].run} --from filtering --store {root.root.address}")
    return 0


def _use_row(use: "BatchUse") -> tuple[object, ...]:
    return (
        *(use.run, use.step, use.batch[:8]),
        *("?" if count is None else count for count in (use.num_rows, use.num_samples, use.num_tokens)),
        "none" if use.version is None else f"{use.version} ({(use.policy or '')[:8]})",
        use.num_later,
    )


def _print_marks(marks: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(marks, default=str))
        return
    rows = [
        (
            *(mark["quarantine"], f"{mark['at']:%Y-%m-%d %H:%M}", mark["run"]),
            *(len(mark["trace_ids"]), mark["where"], mark["reason"]),
        )
        for mark in marks
    ]
    console().print(grid(MARK, rows, left=(0, 1, 2, 4, 5)) if rows else "no quarantines")

"""Quarantine: mark rollouts that turned out to be unfit for training, and say what they went into."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.run import RunConfig
from flows.quarantine.search import BatchUse, search, uses
from flows.reporting.panel import printable
from storage.records import ALL_RUNS, Quarantine
from storage.store import open_store

PRINTED_WIDTH = 140
"""Columns of output that goes to a file or a pipe."""


def main(
    where: str = "",
    reason: str = "",
    run: str = "",
    store: str = "",
    dry_run: bool = False,
    listing: bool = False,
    as_json: bool = False,
) -> int:
    """Record a quarantine and print what used its rollouts, or list all; return the exit status.

    Raises NoSuchRollouts for a condition that is none or describes nothing, RunUnknown for a strange run.
    """
    root = open_store(store or RunConfig().store)
    if listing:
        _print_all(root.quarantines.all(), as_json)
        return 0
    found = search(root, where, run)
    recorded = (
        None if dry_run else root.quarantines.record(found.trace_ids, where=where, reason=reason, run=run or ALL_RUNS)
    )
    described: dict[str, Any] = {
        "quarantine": recorded.quarantine if recorded else None,
        "run": run or ALL_RUNS,
        "where": where,
        "reason": recorded.reason if recorded else reason,
        "num_rollouts": len(found.trace_ids),
        "num_looked_at": found.looked_at,
        "uses": [asdict(use) for use in uses(root, found.trace_ids)],
        "trace_ids": list(found.trace_ids),
    }
    print(json.dumps(described)) if as_json else _print(described, root.root.address)
    return 0


def _print(described: dict[str, Any], store: str) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=PRINTED_WIDTH)
    count = f"{described['num_rollouts']} of {described['num_looked_at']} rollouts"
    if described["quarantine"] is None:
        console.print(Text(f"{count} fit; nothing was recorded (--dry-run)"))
    else:
        console.print(Text(f"quarantine {described['quarantine']}: {count}: {printable(described['reason'])}"))
    used = [BatchUse(**use) for use in described["uses"]]
    if not used:
        console.print(Text("No batch holds a sample of them."))
        return
    _print_uses(console, used)
    for run in dict.fromkeys(use.run for use in used):
        console.print(Text(_summary([use for use in used if use.run == run])))
    if described["quarantine"] is not None:
        # The run that was asked about knows its own rewards.
        run = used[0].run if described["run"] == ALL_RUNS else described["run"]
        console.print(Text("Leave them out, for example:"))
        console.print(Text(f"  stagecoach replay {run} --from filtering --store {store}"), soft_wrap=True)


def _print_uses(console: Console, used: Sequence[BatchUse]) -> None:
    table = Table("run", "step", "batch", box=None, header_style="bold")
    for name in ("rows", "samples", "tokens", "policy made", "later ones"):
        table.add_column(name, justify="right")
    for use in used:
        made = "none" if use.version is None else f"{use.version} ({(use.policy or '')[:8]})"
        counts = ("?" if count is None else str(count) for count in (use.num_rows, use.num_samples, use.num_tokens))
        table.add_row(use.run, str(use.step), use.batch[:8], *counts, made, str(use.num_later))
    console.print(table)


def _summary(used: Sequence[BatchUse]) -> str:
    made = [use.version for use in used if use.version is not None]
    samples, tokens = sum(use.num_samples or 0 for use in used), sum(use.num_tokens or 0 for use in used)
    text = f"run {used[0].run}: {samples} samples, {tokens} tokens in {len(used)} batches"
    if expired := sum(use.num_samples is None for use in used):
        text += f" ({expired} of them kept no longer: what they held is not known)"
    if not made:
        return f"{text}; no policy was trained on them"
    last = max((use.version or 0) + use.num_later for use in used)
    return f"{text}; policies {min(made)} to {last} were trained on them or come from one that was"


def _print_all(every: Sequence[Quarantine], as_json: bool) -> None:
    if as_json:
        rows = [{**asdict(each), "at": each.at.isoformat()} for each in every]
        print(json.dumps(rows))
        return
    console = Console() if sys.stdout.isatty() else Console(width=PRINTED_WIDTH)
    if not every:
        console.print(Text("no quarantines"))
        return
    table = Table("quarantine", "at", "run", box=None, header_style="bold")
    table.add_column("rollouts", justify="right")
    table.add_column("where")
    table.add_column("reason")
    for each in every:
        texts = (Text(printable(each.where)), Text(printable(each.reason)))
        table.add_row(each.quarantine, f"{each.at:%Y-%m-%d %H:%M}", each.run, str(len(each.trace_ids)), *texts)
    console.print(table)

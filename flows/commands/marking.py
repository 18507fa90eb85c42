"""Commands that mark what is in a store: quarantine."""

import argparse

from flows.commands.arguments import Commands, UsageError, add_command


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    text = (
        "mark rollouts that turned out to be unfit for training, and list every batch, step and policy that used them"
    )
    quarantine = add_command(commands, "quarantine", _quarantine, text)
    quarantine.add_argument("--where", default="", help='condition in SQL over the columns of traces: "reward > 0.9"')
    quarantine.add_argument("--reason", default="", help="why they are unfit; verdicts of a replay carry it")
    quarantine.add_argument("--run", default="", help="look at the rollouts of this run only")
    quarantine.add_argument("--dry-run", action="store_true", help="show what would be marked; record nothing")
    quarantine.add_argument("--list", action="store_true", dest="listing", help="list what was recorded")
    quarantine.add_argument("--json", action="store_true", help="for programs")


def _quarantine(arguments: argparse.Namespace) -> int | None:
    from flows.corrections.quarantine import main as quarantine

    asked = arguments.where.strip() and (arguments.reason.strip() or arguments.dry_run)
    if not arguments.listing and not asked:
        raise UsageError("say which rollouts (--where) and why (--reason); --list shows what was marked before")
    return quarantine(
        where=arguments.where,
        reason=arguments.reason,
        run=arguments.run,
        store=arguments.store,
        dry_run=arguments.dry_run,
        listing=arguments.listing,
        as_json=arguments.json,
    )

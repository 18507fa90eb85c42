"""Commands that keep a store in order: maintain, gc, repair."""

import argparse

from flows.commands.arguments import Commands, add_command


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    maintain = add_command(commands, "maintain", _maintain, "compact tables and delete files that nobody needs")
    maintain.add_argument(
        "--retention-hours", type=float, default=168.0, help="age from which on unneeded files are deleted"
    )
    maintain.add_argument(
        "--retain", action="append", default=[], metavar="TABLE=30d", help="drop rows of a table older than that"
    )
    maintain.add_argument("--force", action="store_true", help="also of tables that later stages read")
    _add_common(maintain)
    _add_gc(commands)
    repair = add_command(commands, "repair", _repair, "find damage, set broken logs aside, say what can be done again")
    repair.add_argument("--deep", action="store_true", help="read every file and compare its digest")
    repair.add_argument("--forget", action="store_true", help="forget damaged work that can be done again")
    _add_common(repair)


def _add_gc(commands: Commands) -> None:
    gc = add_command(commands, "gc", _gc, "remove whole runs; what a kept run reaches stays, whoever computed it")
    gc.add_argument("--keep", action="append", default=[], metavar="RUN", help="keep this run; all others go")
    gc.add_argument("--keep-last", type=int, default=0, metavar="N", help="keep the N newest runs as well")
    gc.add_argument("--remove", action="append", default=[], metavar="RUN", help="remove this run; all others stay")
    gc.add_argument(
        "--force", action="append", default=[], metavar="RUN", help="remove this run although it is not finished"
    )
    gc.add_argument("--policies", default="all", help="weights that kept runs keep: all, last, or every:N and the last")
    gc.add_argument("--yes", action="store_true", help="do not ask")
    _add_common(gc)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dry-run", action="store_true", help="change nothing, only say what would be done")
    command.add_argument("--json", action="store_true", help="for programs")


def _maintain(arguments: argparse.Namespace) -> int | None:
    from flows.runtime.maintenance import maintain_store as housekeeping

    return housekeeping(
        store=arguments.store,
        retention_hours=arguments.retention_hours,
        retain=arguments.retain,
        force=arguments.force,
        dry_run=arguments.dry_run,
        as_json=arguments.json,
    )


def _repair(arguments: argparse.Namespace) -> int | None:
    from flows.runtime.repair import main as repair

    return repair(
        store=arguments.store,
        deep=arguments.deep,
        forget_damaged=arguments.forget,
        dry_run=arguments.dry_run,
        as_json=arguments.json,
    )


def _gc(arguments: argparse.Namespace) -> int | None:
    from flows.runtime.maintenance import collect_garbage as gc

    return gc(
        store=arguments.store,
        keep=arguments.keep,
        keep_last=arguments.keep_last,
        remove=arguments.remove,
        force=arguments.force,
        policies=arguments.policies,
        yes=arguments.yes,
        dry_run=arguments.dry_run,
        as_json=arguments.json,
    )

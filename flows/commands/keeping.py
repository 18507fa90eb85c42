"""Commands that keep a store in order: maintain."""

import argparse

from flows.commands.arguments import Commands, add_command


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    add_command(commands, "maintain", _maintain, "compact tables and remove what no ledger row names")


def _maintain(arguments: argparse.Namespace) -> int | None:
    from flows.maintain import main as maintain

    return maintain(store=arguments.store)

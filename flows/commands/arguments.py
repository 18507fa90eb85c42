"""What the commands share: how arguments are declared and read."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

EPILOG = """\
FILES are presets (demo, sft_demo, qwen3_gpu) or TOML files, laid over each other from left to right.
OVERRIDES are written dotted.key=value, for example training.learning_rate=1e-5 or environments.0.max_turns=3.
"""

Command = Callable[[argparse.Namespace], int | None]
Commands = Any
"""What `add_subparsers` returns: argparse has no public name for it."""


class UsageError(ValueError):
    """The arguments of a command do not fit together."""


def add_command(commands: Commands, name: str, command: Command, text: str) -> argparse.ArgumentParser:
    """Add a command that works on a store; the caller adds further arguments to what is returned."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--store", default="", help="root of the store: a directory, or a URL of an object store")
    parser.set_defaults(command=command)
    return parser


def add_run_command(
    commands: Commands, name: str, command: Command, text: str, items: str = "[FILES] [OVERRIDES]"
) -> argparse.ArgumentParser:
    """Add a command that takes files, overrides, or runs in any order, and a name."""
    parser = add_command(commands, name, command, text)
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("items", nargs="*", metavar=items, help="see below")
    parser.add_argument("--name", default="", help="name of the run")
    return parser


def settle(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments; options may stand between files and overrides. Exits with status 2 on a usage error."""
    arguments, rest = parser.parse_known_args(argv)
    stray = [item for item in rest if item.startswith("-")]
    if stray or (rest and not hasattr(arguments, "items")):
        parser.error(f"unrecognized arguments: {' '.join(stray or rest)}")
    if hasattr(arguments, "items"):
        items = [*arguments.items, *rest]
        arguments.overrides = [item for item in items if is_override(item)]
        arguments.files = [item for item in items if not is_override(item)]
    return arguments


def is_override(item: str) -> bool:
    """Tell an override from a file or preset."""
    return "=" in item and not Path(item).is_file()


def one_run(arguments: argparse.Namespace) -> str:
    """Return the one run that the arguments name, or `latest`. Raises UsageError where they name several."""
    names = [name for name in (arguments.name, *arguments.files) if name]
    if len(names) > 1:
        raise UsageError(f"one run at a time, not {' and '.join(names)}; overrides are written dotted.key=value")
    return names[0] if names else "latest"

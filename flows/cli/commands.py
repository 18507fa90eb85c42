"""COMMANDS: the commands of the program, each with its group, its function and its help, as commands.toml has them.

cyclopts imports a command's module when the command is called or its help is printed; the overview imports none.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple

PROGRAM = "stagecoach"
ABOUT = "Post-training of language models with reinforcement learning, in durable stages."


class Command(NamedTuple):
    """A command before its module is imported; commands.toml says what the values are."""

    group: str
    call: str
    help: str


def read_commands() -> dict[str, Command]:
    """Return all commands by name, in the order in which help lists them."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    texts = table.pop("texts")
    return {name: Command(row["group"], row["call"], row["help"].format(**texts)) for name, row in table.items()}


COMMANDS = read_commands()


def overview() -> str:
    """Return the help of the program: every command by group, with the summary of its help."""
    lines = [f"Usage: {PROGRAM} COMMAND", "", ABOUT]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += ["", f"{group}:"]
        summaries = (
            (name, command.help.partition("\n")[0]) for name, command in COMMANDS.items() if command.group == group
        )
        lines += [f"  {name:<{max(map(len, COMMANDS))}}  {summary}" for name, summary in summaries]
    lines += ["", f"`{PROGRAM} COMMAND --help` says what a command takes, with examples."]
    return "\n".join([*lines, f"`{PROGRAM} --install-completion` completes words in bash, zsh and fish."])

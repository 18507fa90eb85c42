"""Commands that exchange rollouts and weights with other programs: import, export."""

import argparse
from pathlib import Path

from flows.commands.arguments import Commands, add_run_command

FORMATS = ("auto", "verifiers", "messages", "prompt")


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    bring = add_run_command(commands, "import", _import, "rollouts of other programs as a run", "FILE... [OVERRIDES]")
    bring.add_argument("--format", default="auto", choices=FORMATS, help="what the lines are; told apart without it")
    bring.add_argument("--model", default="", metavar="DIR", help="model whose tokenizer makes tokens of text")
    bring.add_argument("--environment", default="", metavar="NAME", help="the environment that all rollouts are of")
    bring.add_argument(
        "--groups-per-step", type=int, default=0, metavar="N", help="deal the groups to steps of N; as the files say"
    )
    bring.add_argument("--skip-bad", action="store_true", help="leave out lines that cannot be imported")


def _import(arguments: argparse.Namespace) -> int | None:
    from flows.commands.arguments import UsageError
    from flows.import_config import Request
    from flows.importing import main

    if not arguments.files:
        raise UsageError("import needs a file: stagecoach import traces.jsonl --name RUN")
    if arguments.groups_per_step < 0:
        raise UsageError("--groups-per-step counts groups: give a number from 1 on")
    return main(
        Request(
            files=[Path(file) for file in arguments.files],
            overrides=arguments.overrides,
            name=arguments.name,
            store=arguments.store,
            form=arguments.format,
            model=arguments.model,
            environment=arguments.environment,
            groups_per_step=arguments.groups_per_step,
            skip_bad=arguments.skip_bad,
        )
    )

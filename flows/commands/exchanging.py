"""Commands that exchange rollouts and weights with other programs: import, export."""

import argparse
import re
from pathlib import Path

from flows.commands.arguments import Commands, UsageError, add_command, add_run_command

EXPORTS = ("verifiers", "sft", "preferences", "weights")
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
    bring.add_argument("--held-out", action="store_true", help="attempts at held-out examples too, to be trained on")
    give = add_command(commands, "export", _export, "rollouts or weights of a run as files for other programs")
    give.add_argument("run", nargs="?", default="", metavar="RUN", help="the run; --sql may name rollouts of any run")
    give.add_argument("--format", required=True, choices=EXPORTS, help="what to write")
    give.add_argument("--to", required=True, metavar="PATH", help="file or, for weights, directory; never replaced")
    give.add_argument("--sql", default="", metavar="QUERY", help="question whose answer has the column trace_id")
    give.add_argument("--steps", default="", metavar="A:B", help="3:10 is 3 to 9, also 3: or :10, or one step")
    give.add_argument("--kept", action="store_true", help="only what the run's filters kept")
    give.add_argument("--min-reward", type=float, metavar="R", help="only rewards of at least R")
    give.add_argument("--held-out", action="store_true", help="attempts at held-out examples too")
    give.add_argument("--quarantined", action="store_true", help="rollouts in quarantine too, also in datasets")
    give.add_argument(
        "--pairs", default="extremes", choices=("extremes", "all"), help="the best and the worst of a group, or all"
    )
    give.add_argument("--policy", default="", metavar="RUN:V", help="whose weights; the run's last without it")
    give.add_argument("--force", action="store_true", help="replace the file, or the directory of weights, at PATH")


def _import(arguments: argparse.Namespace) -> int | None:
    from flows.exchange.import_config import Request
    from flows.exchange.importing import main

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
            held_out=arguments.held_out,
        )
    )


def _export(arguments: argparse.Namespace) -> int | None:
    from configs.run import RunConfig
    from flows.exchange.export_rows import Choice
    from flows.exchange.exporting import Request, main

    if not (arguments.run or arguments.sql or arguments.policy):
        raise UsageError("export needs a RUN, a question (--sql) or, for weights, a policy (--policy)")
    first, last = steps_of(arguments.steps)
    choice = Choice(
        run=arguments.run,
        sql=arguments.sql,
        first_step=first,
        last_step=last,
        kept=arguments.kept,
        min_reward=arguments.min_reward,
        held_out=arguments.held_out,
        quarantined=arguments.quarantined,
    )
    return main(
        Request(
            form=arguments.format,
            target=Path(arguments.to).expanduser(),
            choice=choice,
            policy=arguments.policy,
            store=arguments.store or RunConfig().store,
            pairs=arguments.pairs,
            force=arguments.force,
        )
    )


def steps_of(text: str) -> tuple[int, int | None]:
    """Return the first step of `3:10`, `3:`, `:10` or `3`, and the first that is left out; None is no end."""
    match = re.fullmatch(r"(\d*)(:?)(\d*)", text.strip())
    if match is None or text.strip() == ":":
        raise UsageError(f"--steps {text}: say 3:10 (3 to 9), 3: or :10, or one step")
    first = int(match[1] or 0)
    last = int(match[3]) if match[3] else None if match[2] or not text else first + 1
    if last is not None and last <= first:
        raise UsageError(f"--steps {text}: holds no step; the second number is the first step left out")
    return first, last

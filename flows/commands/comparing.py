"""Commands that compare runs and answer for them: diff, gate."""

import argparse

from flows.commands.arguments import Commands, UsageError, add_command


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    diff = add_command(commands, "diff", _diff, "how two runs differ: settings, shared work, and what came of it")
    diff.add_argument("run_a", metavar="RUN_A")
    diff.add_argument("run_b", metavar="RUN_B")
    diff.add_argument("--step", type=int, default=None, help="go into one step: its traces, samples and groups")
    diff.add_argument("--json", action="store_true", help="for programs")
    gate = add_command(commands, "gate", _gate, "decisions at a run's gates; with --approve or --refuse, answer it")
    gate.add_argument("run", nargs="?", default="latest", metavar="RUN")
    answers = gate.add_mutually_exclusive_group()
    answers.add_argument("--approve", action="store_true", help="let the batch that waits be trained on")
    answers.add_argument("--refuse", action="store_true", help="stop the run before it; it can be resumed")
    gate.add_argument("--by", default="", help="who decides; by default the name of the user")
    gate.add_argument("--reason", default="", help="why; stands in the decision")


def _diff(arguments: argparse.Namespace) -> int | None:
    from flows.views.diff import main as diff

    return diff(arguments.run_a, arguments.run_b, step=arguments.step, as_json=arguments.json, store=arguments.store)


def _gate(arguments: argparse.Namespace) -> int | None:
    from flows.orchestration.answering import main as answer

    answered = arguments.approve or arguments.refuse
    if not answered and (arguments.by or arguments.reason):
        raise UsageError("--by and --reason belong to an answer: give --approve or --refuse")
    given = arguments.approve if answered else None
    return answer(arguments.run, given, by=arguments.by, reason=arguments.reason, store=arguments.store)

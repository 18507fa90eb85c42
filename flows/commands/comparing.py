"""Commands that compare runs and algorithms, and answer for runs: diff, algorithms, curves, evals, gate."""

import argparse

from flows.commands.arguments import Commands, UsageError, add_command


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    diff = add_command(commands, "diff", _diff, "how two runs differ: settings, shared work, and what came of it")
    diff.add_argument("run_a", metavar="RUN_A")
    diff.add_argument("run_b", metavar="RUN_B")
    diff.add_argument("--step", type=int, default=None, help="go into one step: its traces, samples and groups")
    diff.add_argument("--json", action="store_true", help="for programs")
    algorithms = add_command(
        commands, "algorithms", _algorithms, "a run's rollouts credited by several algorithms, side by side"
    )
    algorithms.add_argument("run", metavar="RUN", help="the recorded run; it is not changed")
    algorithms.add_argument("names", nargs="*", metavar="ALGORITHM", help="which; without any, all that need no engine")
    algorithms.add_argument("--steps", default="", metavar="A:B", help="which steps: 3:10 is 3 to 9; all without it")
    algorithms.add_argument("--teacher", default="", metavar="POLICY", help="for opd: a directory of weights, RUN, or "
                            "RUN:VERSION")  # fmt: skip
    algorithms.add_argument("--demonstration", default="", metavar="FIELD", help="for opsd: the field of the example "
                            "that holds a demonstration")  # fmt: skip
    algorithms.add_argument("--output", default="", metavar="FILE", help="write a page in markdown")
    algorithms.add_argument("--json", action="store_true", help="for programs")
    algorithms.add_argument("--plain", action="store_true", help="plain lines instead of a live panel")
    curves = add_command(commands, "curves", _curves, "the rewards of several runs by step, side by side")
    curves.add_argument("runs", nargs="+", metavar="RUN")
    curves.add_argument("--output", default="", metavar="FILE", help="write a page in markdown, and its picture")
    evals = add_command(commands, "evals", _evals, "the evaluations of runs, and how far each is from the first")
    evals.add_argument("runs", nargs="*", default=["latest"], metavar="RUN")
    evals.add_argument(
        "--by", default="", metavar="FIELD", help="tell the values of a field of the examples' tasks apart"
    )
    evals.add_argument("--output", default="", metavar="FILE", help="write them as Parquet, one row for each figure")
    evals.add_argument("--json", action="store_true", help="for programs")
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


def _algorithms(arguments: argparse.Namespace) -> int | None:
    from flows.views.credited import main as credited

    return credited(
        arguments.run,
        arguments.names,
        steps=arguments.steps,
        teacher=arguments.teacher,
        demonstration=arguments.demonstration,
        store=arguments.store,
        output=arguments.output,
        as_json=arguments.json,
        plain=arguments.plain,
    )


def _curves(arguments: argparse.Namespace) -> int | None:
    from flows.views.curves import main as curves

    return curves(arguments.runs, store=arguments.store, output=arguments.output)


def _evals(arguments: argparse.Namespace) -> int | None:
    from flows.views.evals import main as evals

    given = {"by": arguments.by, "output": arguments.output, "as_json": arguments.json}
    return evals(arguments.runs, store=arguments.store, **given)


def _gate(arguments: argparse.Namespace) -> int | None:
    from flows.orchestration.answering import main as answer

    answered = arguments.approve or arguments.refuse
    if not answered and (arguments.by or arguments.reason):
        raise UsageError("--by and --reason belong to an answer: give --approve or --refuse")
    given = arguments.approve if answered else None
    return answer(arguments.run, given, by=arguments.by, reason=arguments.reason, store=arguments.store)

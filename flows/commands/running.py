"""Commands that run something: demo, run, sft, eval, resume."""

import argparse
from typing import Any

from flows.commands.arguments import Commands, UsageError, add_run_command, one_run


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    demo = add_run_command(
        commands, "demo", _demo, "train a small model from nothing to good, on this machine", "[PRESET] [OVERRIDES]"
    )
    run = add_run_command(commands, "run", _run, "reinforcement learning; the same name again goes on where it stopped")
    sft = add_run_command(commands, "sft", _sft, "supervised training on demonstrations")
    evaluate = add_run_command(commands, "eval", _eval, "score a policy on held-out examples")
    evaluate.add_argument("--policy", default="", help="RUN or RUN:VERSION; without it, the weights of model.path")
    evaluate.add_argument("--url", default="", help="a chat API of someone else (https://host/v1) in place of a policy")
    evaluate.add_argument("--model", default="", help="the model's name there")
    evaluate.add_argument("--retry-errors", type=int, default=0, metavar="N", help="make rollouts that ended with an "
                          "error again, up to N times")  # fmt: skip
    resume = add_run_command(commands, "resume", _resume, "go on with a run of the store", "[RUN] [OVERRIDES]")
    for command in (demo, run, sft, evaluate, resume):
        command.add_argument("--plain", action="store_true", help="plain lines instead of a live panel")


def _demo(arguments: argparse.Namespace) -> int | None:
    from flows.runtime.demo import main as demo
    from flows.runtime.demo_recipes import RECIPES

    if len(arguments.files) > 1 or not set(arguments.files) <= set(RECIPES):
        known = ", ".join(RECIPES)
        raise UsageError(f"demo takes one of {known}, not {' '.join(arguments.files)}; `stagecoach run` takes files")
    return demo(*arguments.files, overrides=arguments.overrides, **_settings(arguments))


def _start(kind: str, arguments: argparse.Namespace) -> int | None:
    from flows.runtime.launch import start

    return start(kind, arguments.files, arguments.overrides, **_settings(arguments))


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"name": arguments.name, "store": arguments.store, "plain": arguments.plain}


def _run(arguments: argparse.Namespace) -> int | None:
    return _start("train", arguments)


def _sft(arguments: argparse.Namespace) -> int | None:
    return _start("sft", arguments)


def _eval(arguments: argparse.Namespace) -> int | None:
    from flows.runtime.prepare import assignments

    given = {"policy": arguments.policy, "external.url": arguments.url, "external.model": arguments.model}
    given |= {"retry_errors": arguments.retry_errors}
    chosen = assignments({f"evaluation.{name}": value for name, value in given.items() if value})
    arguments.overrides = [*arguments.overrides, *chosen]
    return _start("evaluate", arguments)


def _resume(arguments: argparse.Namespace) -> int | None:
    from flows.runtime.launch import resume

    return resume(one_run(arguments), overrides=arguments.overrides, store=arguments.store, plain=arguments.plain)

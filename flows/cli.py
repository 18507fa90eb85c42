"""The command line: reads arguments and calls what does the work; nothing heavy is imported before that.

The one border where errors meant for people become one message: exit status 2 for those, 130 for an interrupt.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

OURS = ("configs", "storage", "tasks", "flows")
EPILOG = """\
FILES are presets (demo, sft_demo, qwen3_gpu) or TOML files, laid over each other from left to right.
OVERRIDES are written dotted.key=value, for example training.learning_rate=1e-5 or environments.0.max_turns=3.
"""

Command = Callable[[argparse.Namespace], int | None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 not ready, 2 a mistake that the message explains."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    warnings.formatwarning = lambda message, *_, **__: f"stagecoach: {message}\n"
    try:
        return arguments.command(arguments) or 0
    except KeyboardInterrupt:
        print("\nInterrupted. What is committed is safe; `stagecoach resume` goes on from there.", file=sys.stderr)
        return 130
    except Exception as error:
        message = explanation(error)
        if message is None:
            raise
        print(f"stagecoach: {message}", file=sys.stderr)
        return 2


def explanation(error: BaseException) -> str | None:
    """Return what to tell a person about `error`, or None where only a traceback would explain it."""
    if "No space left on device" in str(error):
        return f"the disk is full: {error}. What is committed is safe: make room, then `stagecoach resume`."
    if type(error).__module__.partition(".")[0] not in OURS:
        return None
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments; options may stand between files and overrides. Exits with status 2 on a usage error."""
    parser = _parser()
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stagecoach",
        description="Post-training of language models with reinforcement learning, as a pipeline of durable stages.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    demo = _add(commands, "demo", _demo, "train a small model from nothing to good, on this machine", "[OVERRIDES]")
    run = _add(commands, "run", _run, "reinforcement learning; the same name again goes on where it stopped")
    sft = _add(commands, "sft", _sft, "supervised training on demonstrations")
    evaluate = _add(commands, "eval", _eval, "score a policy on held-out examples")
    evaluate.add_argument("--policy", default="", help="RUN or RUN:VERSION; without it, the weights of model.path")
    resume = _add(commands, "resume", _resume, "go on with a run of the store", "[RUN]")
    for command in (demo, run, sft, evaluate, resume):
        command.add_argument("--plain", action="store_true", help="plain lines instead of a live panel")
    show = _add(commands, "show", _show, "a run at a glance, and what OVERRIDES would run again", "[RUN] [OVERRIDES]")
    show.add_argument("--json", action="store_true", help="for programs")
    check = _add(commands, "check", _check, "resolve and validate a config and print the plan; starts nothing")
    check.add_argument("--json", action="store_true", help="print the resolved config as JSON instead")
    doctor = commands.add_parser("doctor", help="is this machine ready, and what to do if not")
    doctor.add_argument("--store", default="", help="store whose disk is looked at")
    doctor.set_defaults(command=_doctor)
    maintain = commands.add_parser("maintain", help="compact tables and remove what no ledger row names")
    maintain.add_argument("--store", default="", help="root of the store")
    maintain.set_defaults(command=_maintain)
    return parser


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    command: Command,
    text: str,
    items: str = "[FILES] [OVERRIDES]",
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=text, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("items", nargs="*", metavar=items, help="see below")
    parser.add_argument("--store", default="", help="root of the store: a directory, or a URL of an object store")
    parser.add_argument("--name", default="", help="name of the run")
    parser.set_defaults(command=command)
    return parser


def _one_run(arguments: argparse.Namespace) -> str:
    names = [name for name in (arguments.name, *arguments.files) if name]
    if len(names) > 1:
        raise UsageError(f"one run at a time, not {' and '.join(names)}; overrides are written dotted.key=value")
    return names[0] if names else "latest"


class UsageError(ValueError):
    """The arguments of a command do not fit together."""


def _demo(arguments: argparse.Namespace) -> int | None:
    from flows.demo import main as demo

    if arguments.files:
        raise UsageError(f"demo takes overrides only, not {arguments.files[0]}; `stagecoach run` takes files")
    return demo(overrides=arguments.overrides, **_settings(arguments))


def _start(kind: str, arguments: argparse.Namespace) -> int | None:
    from flows.launch import start

    return start(kind, arguments.files, arguments.overrides, **_settings(arguments))


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"name": arguments.name, "store": arguments.store, "plain": arguments.plain}


def _run(arguments: argparse.Namespace) -> int | None:
    return _start("train", arguments)


def _sft(arguments: argparse.Namespace) -> int | None:
    return _start("sft", arguments)


def _eval(arguments: argparse.Namespace) -> int | None:
    if arguments.policy:
        arguments.overrides = [*arguments.overrides, f'evaluation.policy="{arguments.policy}"']
    return _start("evaluate", arguments)


def _resume(arguments: argparse.Namespace) -> int | None:
    from flows.launch import resume

    return resume(_one_run(arguments), overrides=arguments.overrides, store=arguments.store, plain=arguments.plain)


def _show(arguments: argparse.Namespace) -> int | None:
    from flows.show import main as show

    return show(_one_run(arguments), overrides=arguments.overrides, store=arguments.store, as_json=arguments.json)


def _check(arguments: argparse.Namespace) -> int | None:
    from flows.plan import main as plan
    from flows.prepare import assignments

    given = {key: getattr(arguments, key) for key in ("name", "store") if getattr(arguments, key)}
    return plan(arguments.files, [*arguments.overrides, *assignments(given)], as_json=arguments.json)


def _doctor(arguments: argparse.Namespace) -> int | None:
    from flows.doctor import main as doctor

    return doctor(store=arguments.store)


def _maintain(arguments: argparse.Namespace) -> int | None:
    from flows.maintain import main as maintain

    return maintain(store=arguments.store)


if __name__ == "__main__":
    sys.exit(main())

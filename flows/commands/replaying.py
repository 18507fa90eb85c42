"""The command that goes through recorded work again: replay."""

import argparse
from typing import Any

from flows.commands.arguments import Commands, UsageError, add_command

STEPS = "which steps: 3:10 is 3 to 9, also 3: or :10, or one step"


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    replay = add_command(
        commands, "replay", _replay, "recorded steps again in a new run: shared up to a stage, done from there on"
    )
    replay.add_argument("run", metavar="RUN", help="the recorded run; it is not changed")
    replay.add_argument("--from", dest="from_stage", default="", metavar="STAGE", help="first stage to do again; "
                        "without it, the first that the settings reach")  # fmt: skip
    replay.add_argument("--until", default="", metavar="STAGE", help="last stage to do again; training without it")
    replay.add_argument("--steps", default="", metavar="A:B", help=STEPS)
    replay.add_argument("--set", dest="overrides", action="append", nargs="+", default=[], metavar="KEY=VALUE",
                        help="another setting, for example algorithm.type=rloo")  # fmt: skip
    replay.add_argument("--vary", action="append", nargs="+", default=[], metavar="KEY=VALUE",
                        help="one replay for each --vary, with these settings beside those of --set")  # fmt: skip
    replay.add_argument("--name", default="", help="name of the new run; the same replay has the same name again")
    replay.add_argument("--policies", default="", choices=("own", "recorded"), help="own: train along, each step "
                        "from the policy made before; recorded: each step from the recorded policy")  # fmt: skip
    replay.add_argument("--regrade", action="store_true", help="score the traces again with today's reward functions")
    replay.add_argument("--no-quarantine", dest="quarantine", action="store_false", help="keep quarantined rollouts")
    replay.add_argument("--plain", action="store_true", help="plain lines instead of a live panel")


def _replay(arguments: argparse.Namespace) -> int | None:
    from flows.runtime.launch import replays

    shared = [each for group in arguments.overrides for each in group]
    if arguments.name and len(arguments.vary) > 1:
        raise UsageError("--name is for one replay; several (--vary) name themselves")
    return replays([_asked(arguments, [*shared, *own]) for own in arguments.vary or [[]]], plain=arguments.plain)


def _asked(arguments: argparse.Namespace, overrides: list[str]) -> Any:
    from flows.replays.request import ReplayRequest

    return ReplayRequest(
        run=arguments.run,
        from_stage=arguments.from_stage,
        until=arguments.until,
        steps=arguments.steps,
        overrides=overrides,
        name=arguments.name,
        store=arguments.store,
        policies=arguments.policies,
        regrade=arguments.regrade,
        quarantine=arguments.quarantine,
    )

"""Commands that look at a run, a config or this machine: show, check, doctor, lora-smoke."""

import argparse

from flows.commands.arguments import EPILOG, Commands, add_run_command, one_run


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    show = add_run_command(
        commands, "show", _show, "a run at a glance, and what OVERRIDES would run again", "[RUN] [OVERRIDES]"
    )
    show.add_argument("--json", action="store_true", help="for programs")
    check = add_run_command(
        commands, "check", _check, "resolve and validate a config and print the plan; starts nothing"
    )
    check.add_argument("--json", action="store_true", help="print the resolved config as JSON instead")
    doctor = commands.add_parser("doctor", help="is this machine ready, and what to do if not")
    doctor.add_argument("--store", default="", help="store whose disk is looked at")
    doctor.set_defaults(command=_doctor)
    smoke = commands.add_parser(
        "lora-smoke",
        help="does the engine here serve adapters right, and at what cost",
        description="Three probes over random adapters: base and adapter in one batch, swaps, slowdown. Keeps nothing.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    smoke.add_argument("items", nargs="*", metavar="[FILES] [OVERRIDES]", help="model.path=DIR; see below")
    smoke.set_defaults(command=_lora_smoke)


def _show(arguments: argparse.Namespace) -> int | None:
    from flows.views.show import main as show

    return show(one_run(arguments), overrides=arguments.overrides, store=arguments.store, as_json=arguments.json)


def _check(arguments: argparse.Namespace) -> int | None:
    from flows.runtime.prepare import assignments
    from flows.views.plan import main as plan

    given = {key: getattr(arguments, key) for key in ("name", "store") if getattr(arguments, key)}
    return plan(arguments.files, [*arguments.overrides, *assignments(given)], as_json=arguments.json)


def _doctor(arguments: argparse.Namespace) -> int | None:
    from flows.views.doctor import main as doctor

    return doctor(store=arguments.store)


def _lora_smoke(arguments: argparse.Namespace) -> int | None:
    from flows.runtime.lora_smoke import main as lora_smoke

    return lora_smoke(arguments.files, arguments.overrides)

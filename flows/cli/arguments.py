"""The command-line application: its groups of commands, and the arguments that several commands share.

A command is the function that does its work, with a type for each argument; flows.cli.commands has its help text.
cyclopts imports its module when the command is called or its help is printed.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter, Token
from cyclopts.validators import mutually_exclusive

from configs.store import default_store
from flows.cli.commands import ABOUT, COMMANDS, PROGRAM, epilogue
from tasks.runtime.imports import DISTRIBUTION


class UsageError(ValueError):
    """The arguments of a command do not fit together."""


def _default_for_help(value: Any) -> str | None:
    return str(value) if value and value is not True else None


app = App(
    name=PROGRAM,
    help=ABOUT,
    help_format="plaintext",
    version=lambda: f"{PROGRAM} {version(DISTRIBUTION)}",
    version_flags=("--version",),
    # The last of several values counts, a flag has no opposite, and `[1, 2]` is one value of a list of them.
    default_parameter=Parameter(
        allow_repeating=True, negative=(), json_list=False, json_dict=False, show_default=_default_for_help
    ),
)
for _name, _command in COMMANDS.items():
    # By its path: a command is imported when it is called, or its help is asked for.
    app.command(
        f"{__package__}.{_command.function}",
        name=_name,
        group=_command.group,
        help=_command.help,
        help_epilogue=epilogue(_name),
        usage=f"Usage: {PROGRAM} {_name} {_command.usage} [OPTIONS]" if _command.usage else None,
    )
app.register_install_completion_command(help="Install shell completion for bash, zsh or fish, and say where.")


def one_of() -> tuple[str, Group]:
    """Return the group of options of which one may be given; help shows them among the others."""
    return "Parameters", Group(validator=mutually_exclusive)


def option(text: str = "", metavar: str | None = None, **more: Any) -> Parameter:
    """Return what is said of an argument in help, and how it is read where its name and type do not tell.

    What a shell offers for it follows from its metavar.
    """
    words = set(re.findall(r"[A-Z]+", metavar or ""))
    offered = [offer for name, offer in OFFERS.items() if name in words]
    if offered:
        more["completer"] = lambda context: [each for offer in offered for each in offer(context)]
    return Parameter(help=text, metavar=metavar, **more)


def _recorded_runs(context: Any) -> list[str]:
    """Return the runs of the store that a half-typed command means; nothing of one that lies elsewhere."""
    # By the directories of the table: opening the store would take longer than anybody waits for a word.
    with suppress(KeyError, OSError):
        root = Path(str(context["store"].raw or default_store())) / "tables" / "runs"
        return sorted(path.name.removeprefix("run=") for path in root.glob("run=*"))
    return []


def _known_presets(_: Any) -> list[str]:
    from configs.layers import presets

    return presets()


def _known_keys(_: Any) -> list[str]:
    from configs.load import known_keys
    from configs.run import RunConfig

    # Sections of several types share keys.
    return list(dict.fromkeys(key for key in known_keys(RunConfig) if "*" not in key))


def _overrides(context: Any) -> list[str]:
    return [f"{key}=" for key in _known_keys(context)]


OFFERS: Mapping[str, Callable[[Any], list[str]]] = {
    "RUN": _recorded_runs,
    "FILES": _known_presets,
    "PRESET": _known_presets,
    "KEY": _known_keys,
    "OVERRIDES": _overrides,
}
"""What completion offers for an argument, by the words of its metavar."""


MOST = 10**9
"""The greatest number that an argument may be; no store has more of anything that is counted or named by one."""


def _whole_number(least: int, most: int = MOST) -> Parameter:
    """Return how a whole number from `least` to `most` is read; any other text is a mistake."""

    def read(_: object, tokens: Sequence[Token]) -> int:
        text = tokens[0].value
        # cyclopts would round 1.5 and take 0x10, int() alone 1_000 and digits of any script and number.
        if re.fullmatch(r"[+-]?[0-9]{1,20}", text) is None:
            raise ValueError(f'"{text[:40]}" is not a whole number of up to 20 digits')
        if not least <= int(text) <= most:
            raise ValueError(f'"{text}" is not between {least} and {most}')
        return int(text)

    return Parameter(converter=read)


def _finite(_: object, tokens: Sequence[Token]) -> float:
    """Read a number that is neither infinite nor NaN, nor so large that nothing can be compared with it."""
    text = tokens[0].value
    with suppress(ValueError):
        if abs(float(text)) <= MOST:
            return float(text)
    raise ValueError(f'"{text[:40]}" is not a number between {-MOST} and {MOST}')


def _positive(type_: object, tokens: Sequence[Token]) -> float:
    """Read a finite number above zero."""
    if (found := _finite(type_, tokens)) <= 0:
        raise ValueError(f'"{tokens[0].value[:40]}" is not above 0')
    return found


Count = Annotated[int, _whole_number(1)]
"""A whole number from 1 on."""
Index = Annotated[int, _whole_number(0)]
"""A whole number from 0 on."""
Port = Annotated[int, _whole_number(0, 65535)]
Number = Annotated[float, Parameter(converter=_finite)]
Positive = Annotated[float, Parameter(converter=_positive)]
StoreOption = Annotated[
    str,
    option(
        "the store: a directory, or a URL of an object store; by default STAGECOACH_STORE, else stagecoach-store here"
    ),
]
Json = Annotated[bool, option("print JSON for programs", name="--json")]
Plain = Annotated[bool, option("plain lines instead of a live panel")]
Force = Annotated[bool, option("replace an existing file")]
DryRun = Annotated[bool, option("change nothing, only print what would be done")]
Name = Annotated[str, option("name of the run")]
OfRun = Annotated[str, option("only the rows that this run uses", "RUN")]
Items = Annotated[str, option("FILES and OVERRIDES, in any order; see below", "[FILES] [OVERRIDES]")]
RunItems = Annotated[str, option("a RUN of the store and OVERRIDES; see below", "[RUN] [OVERRIDES]")]


def split_items(items: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the files or runs, and the overrides, of items in any order."""
    files: list[str] = []
    overrides: list[str] = []
    # A file may have an equals sign in its name: one that is there is a file.
    for item in items:
        (overrides if "=" in item and not _is_file(item) else files).append(item)
    return files, overrides


def _is_file(item: str) -> bool:
    with suppress(OSError, ValueError):  # no name that a file could have
        return Path(item).is_file()
    return False


def run_and_step(text: str, step: int | None = None, evaluation: int | None = None) -> tuple[str, int | None]:
    """Return the run and the step of RUN:STEP; of RUN alone the step is `step`.

    Raises UsageError for a step that is no number, and where an option names a step or an evaluation too.
    """
    run, colon, name = text.partition(":")
    if not colon:
        return run, step
    if not re.fullmatch(r"[0-9]{1,10}", name):
        raise UsageError(f"{text!r}: a step is named RUN:STEP, for example {run or 'demo'}:3")
    if (step, evaluation) != (None, None):
        raise UsageError(f"{text} names the step: leave out --step and --evaluation")
    return run, int(name)


def one_run(names: Iterable[str]) -> str:
    """Return the one run that is named, or `latest`. Raises UsageError where there are several."""
    names = [name for name in names if name]
    if len(names) > 1:
        raise UsageError(f"one run at a time, not {' and '.join(names)}; overrides are written dotted.key=value")
    return names[0] if names else "latest"

"""The command-line application: its groups of commands, and the arguments that several commands share.

A command is the function that does its work, with a type for each argument; flows.cli.commands has its help text.
cyclopts imports its module when the command is called or its help is printed, so a module of commands imports what its
functions need inside them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from inspect import BoundArguments
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter, Token
from cyclopts.validators import mutually_exclusive

from configs.store import default_store
from flows.cli.commands import ABOUT, COMMANDS, PROGRAM
from tasks.runtime.imports import DISTRIBUTION

if TYPE_CHECKING:
    from configs.run import RunConfig
    from flows.queries.store_reader import StoreReader


class UsageError(ValueError):
    """The arguments of a command do not fit together."""


app = App(
    name=PROGRAM,
    help=ABOUT,
    help_format="plaintext",
    version=lambda: f"{PROGRAM} {version(DISTRIBUTION)}",
    version_flags=("--version",),
    # The last of several values counts, a flag has no opposite, and `[1, 2]` is one value of a list of them.
    default_parameter=Parameter(
        allow_repeating=True,
        negative=(),
        json_list=False,
        json_dict=False,
        show_default=lambda value: str(value) if value and value is not True else None,
    ),
)
for _name, _command in COMMANDS.items():
    _function, _, _arguments = _command.call.partition(" ")
    _help, _heading, _examples = _command.help.partition("Examples:")
    app.command(
        f"{__package__}.{_function}",
        name=_name,
        group=_command.group,
        help=_help,
        help_epilogue=_heading + _examples,
        usage=f"Usage: {PROGRAM} {_name} {_arguments} [OPTIONS]" if _arguments else None,
    )
app.register_install_completion_command(help="Install shell completion for bash, zsh or fish, and say where.")


def one_of() -> tuple[str, Group]:
    """Return the group of options of which one may be given; help shows them among the others."""
    return "Parameters", Group(validator=mutually_exclusive)


def option(text: str, metavar: str | None = None, **more: Any) -> Parameter:
    """Return the help of an argument, and how it is read if its name and type do not tell.

    Shells complete it by its `metavar`: names of runs, or presets, files and keys of settings.
    """
    kinds = re.findall(r"RUN|FILES|\[KEY\]|KEY=|(?<!\.\.\. \[)OVERRIDES", metavar or "")
    return Parameter(help=text, metavar=metavar, completer=partial(_words, kinds) if kinds else None, **more)


def _words(kinds: Sequence[str], context: Any) -> Iterator[str]:
    """Yield the words that a shell offers for an argument; cyclopts gives what is typed so far."""
    from glob import escape, glob

    from configs.layers import presets
    from configs.load import settings

    if "RUN" in kinds:
        yield from open_reader(context["--store"].raw or "").store.runs.names()
    if "FILES" in kinds:
        yield from (*presets(), *glob(f"{escape(context.incomplete)}*.toml"))
    if kinds != ["RUN"]:
        yield from (setting.key + "=" * ("[KEY]" not in kinds) for setting in settings([], []))


def with_runs_in_full(bound: BoundArguments) -> None:
    """Give the arguments of a command that name runs the whole name, where one run of the store alone begins so."""
    given, parameters = bound.arguments, bound.signature.parameters
    for name in given:
        if any("RUN" in (part.metavar or "") for part in getattr(parameters[name].annotation, "__metadata__", ())):
            with suppress(Exception):  # the command says what is wrong with the store
                known = open_reader(given.get("store", "")).store.runs.names()
                whole = [
                    _in_full(text, known) for text in ([given[name]] if isinstance(given[name], str) else given[name])
                ]
                given[name] = whole[0] if isinstance(given[name], str) else tuple(whole)


def _in_full(text: str, known: Sequence[str]) -> str:
    run, colon, step = text.partition(":")
    begun = [name for name in known if name.startswith(run)]
    return text if run in ("", "latest", *known) or len(begun) != 1 else f"{begun[0]}{colon}{step}"


MAX_NUMBER = 10**9
"""The greatest number that an argument may be; no store has more of anything that is counted or named by one."""


def number(kind: type[int] | type[float], least: float, most: float = MAX_NUMBER) -> Parameter:
    """Return how a number from `least` to `most` is read; cyclopts would round 1.5 to a whole one, and take NaN."""

    def read(_: object, tokens: Sequence[Token]) -> float:
        text = tokens[0].value
        with suppress(ValueError):
            if re.fullmatch("[0-9a-zA-Z.+-]+", text) and least <= (value := kind(text)) <= most:
                return value
        noun = "whole number" if kind is int else "number"
        raise ValueError(f'"{text[:40]}" is not a {noun} between {least} and {most}')

    return Parameter(converter=read)


Count = Annotated[int, number(int, 1)]
Index = Annotated[int, number(int, 0)]
Port = Annotated[int, number(int, 0, 65535)]
Number = Annotated[float, number(float, -MAX_NUMBER)]
Positive = Annotated[float, number(float, 1e-9)]
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
RunOrLatest = Annotated[str, option("a run, `latest` for the newest", "RUN")]
Items = Annotated[str, option("FILES and OVERRIDES, in any order; see below", "[FILES] [OVERRIDES]")]
RunItems = Annotated[str, option("a RUN of the store and OVERRIDES; see below", "[RUN] [OVERRIDES]")]


def split_items(items: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the files or runs, and the overrides, of items in any order."""
    files: list[str] = []
    overrides: list[str] = []
    for item in items:  # a file may have an equals sign in its name
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


def named_policy(store: str, text: str) -> str:
    """Return RUN:VERSION for a policy that is named by the first characters of its key; a run's name stays as it is.

    Raises UnknownId where no policy's key begins so, or those of several do, LayoutError without a store.
    """
    from flows.queries.row_lineage import SHORTEST_PREFIX, identify, policy_name

    if not re.fullmatch(f"[0-9a-f]{{{SHORTEST_PREFIX},}}", text):
        return text
    reader = open_reader(store)
    if text in reader.store.runs.names():  # such as 20261130
        return text
    policy = identify(reader.frames(), text, "policy").roots[0]
    return policy_name(reader.graph, policy.key) or text


def open_reader(store: str) -> "StoreReader":
    """Return a reader of a store for one answer: it forgets nothing. Raises LayoutError without a store."""
    from flows.queries.store_reader import StoreReader

    return StoreReader.at(store or default_store(), most_bytes=None)


def stored_run(store: str, run: str) -> "tuple[StoreReader, str, RunConfig]":
    """Return a reader of a store, and name and config of a run of it, `latest` for the newest.

    Raises LayoutError without a store, RunUnknown without such a run.
    """
    from flows.queries.store_reader import recorded_run

    reader = open_reader(store)
    return reader, *recorded_run(reader.store, run)

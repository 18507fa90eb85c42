"""A project to start from: `stagecoach init`."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from glob import glob
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from flows.cli import project
from flows.cli.arguments import UsageError, option
from flows.reporting.formats import say

if TYPE_CHECKING:
    from flows.exchange.trainers import Translation

DATA = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz")
"""Ends of the names of files with data."""
NUM_READ = 1000
"""Rows that are read before the project is written."""


def init(
    directory: Annotated[str, option("the project's directory; it is made where there is none", "DIR")],
    /,
    *,
    data: Annotated[
        str,
        option(
            "your examples: a file (.jsonl, .json, .csv, .tsv, .parquet), a pattern in quotes, or the data set "
            "OWNER/NAME of the hub"
        ),
    ] = "",
    prompt: Annotated[str, option("column of the data with the prompts: texts, or chat messages", "COLUMN")] = "",
    answer: Annotated[str, option("column of the data with the answers", "COLUMN")] = "",
    environment: Annotated[str, option("id of an installed verifiers environment that the project is for")] = "",
    from_files: Annotated[
        tuple[str, ...],
        option(
            "what another trainer was given: configs of prime-rl; arguments of TRL's GRPOConfig in YAML, TOML, JSON, a "
            "script, notebook or Markdown page; a shell script that starts verl or OpenRLHF. Nothing of it is run",
            "FILE",
            name="--from",
            consume_multiple=(1, None),
        ),
    ] = (),
) -> int:
    """Make a project that trains; existing files are not overwritten."""
    if sum(map(bool, (data, environment, from_files))) > 1 or ((prompt or answer) and not data):
        text = "--data, --environment and --from are ways to begin: give one of them"
        raise UsageError(f"{text}; --prompt and --answer are columns of --data")
    from configs.environments import EnvironmentConfig
    from configs.load import load
    from flows.cli.plan import prompt_lines
    from tasks.inference.environments.packages import package_version

    outcomes: list[str] = []
    here = ", ".join(sorted(name for name in glob("*") if name.endswith(DATA)))
    if here and not (data or environment or from_files):  # without a file, the next pasted line would be the answer
        data = _ask(f"File with your examples, of {here}, or nothing for a sample", "")
    if environment:
        package_version(EnvironmentConfig(name=environment, taskset={"id": environment}))  # or it is refused
        files = project.for_environment(environment)
    elif from_files:
        files, outcomes = _from_files(from_files)
    else:
        settings, tasks = _data(data, prompt, answer) if data else ({}, [])
        files = project.own_data(settings)
    project.write(Path(directory), files)
    if data:
        outcomes += prompt_lines(tasks, load([Path(directory) / project.CONFIG]).model)
    for line in (*outcomes, f"{directory}: {', '.join(files)}", "Next:"):
        say(line)
    if Path(directory).resolve() != Path.cwd():
        print(f"  cd {directory}")
    print("  stagecoach check config.toml        # what it comes to, and what is missing; starts nothing")
    print("  stagecoach run config.toml          # the model `demo` knows the sample alone: another task needs yours")
    print("  stagecoach view                     # runs, rollouts and rewards in a browser")
    return 0


def _ask(question: str, default: str) -> str:
    """Return what is answered on a terminal; elsewhere, and for no answer, the default."""
    with suppress(EOFError):
        return (input(f"{question} [{default}]: ").strip() if sys.stdin.isatty() else "") or default
    return default


def _data(data: str, prompt: str, answer: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return settings of the taskset `own_data` for somebody's data, and its first tasks. Raises DataUnusable."""
    from own_data.taskset import OwnDataConfig, OwnDataTaskset

    is_file = data.endswith(DATA) or "/" not in data or glob(data)
    settings = {"path": str(Path(data).absolute())} if is_file else {"hub": data}
    _, row = next(OwnDataConfig(id="own_data", **settings).rows(), ("", {}))
    for what, column in (("prompt", prompt), ("answer", answer)):
        settings[f"{what}_column"] = column or _ask(f"Column with the {what}, of {', '.join(row)}", what)
    tasks = islice(OwnDataTaskset(OwnDataConfig(id="own_data", **settings)).load(), NUM_READ)
    return settings, [task.data.model_dump(mode="json") for task in tasks]


def _from_files(sources: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the files of a project made of what another trainer was given, and lines on what became of its keys."""
    from flows.exchange.trainers import SAMPLE, config_of, translate

    translation = translate(sources)
    _use_installed(translation)
    name, config = translation.table["name"], config_of(translation.settings)
    lists = {"environments": config["environments"]}
    lists["evaluation.environments"] = config.get("evaluation", {}).get("environments", [])
    settings = {key: value for key, value in translation.settings.items() if not key.startswith((*lists,))}
    origins = {key: translation.origin(key) for key in settings}
    head = (
        f"Made of {', '.join(Path(source).name for source in sources)} of {name}. Comments are the keys of a setting."
    )
    files = {project.CONFIG: project.of_settings(settings, lists, origins, head)}
    taskset = config["environments"][0]["taskset"]
    scoring = taskset.get("task", {}).get("scoring")
    if scoring == SAMPLE["taskset"]["task"]["scoring"] or isinstance(scoring, dict):  # functions beside the config
        is_sample = taskset.get("path") == project.EXAMPLES
        files |= project.data_files() if is_sample else {}
        if not is_sample or isinstance(scoring, dict):
            files[project.REWARD] = project.rewards(scoring if isinstance(scoring, dict) else ["reward"])
    lines = list[str]()
    for part, texts in translation.report().items():
        page = f", see docs/coming-from-{name.lower()}.md" if part == "lost" else ""
        lines += [f"{part}: {len(texts)}{page}", *(f"  {text}" for text in texts)]
    return files, lines


def _use_installed(translation: "Translation") -> None:
    """Name a sample that ships in place of a taskset that is not installed, and note those without one as problems."""
    from tasks.inference.environments.packages import EnvironmentUnavailable, Plugin

    for key, name in translation.settings.items():
        if key.endswith("taskset.id"):
            plugin = Plugin("taskset", {"id": name}, "tasksets")
            sample = Plugin("taskset", {"id": f"sample_{plugin.module}"}, "tasksets")
            try:
                plugin.part(name)
            except EnvironmentUnavailable as error:
                with suppress(EnvironmentUnavailable):
                    sample.part(name)
                    translation.settings[key] = sample.module
                    continue
                translation.problems.append(str(error))

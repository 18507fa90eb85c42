"""A project to start from: `stagecoach init`."""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from flows.cli import project
from flows.cli.arguments import UsageError, option
from flows.reporting.formats import say

if TYPE_CHECKING:
    from flows.exchange.trainers import ForeignTrainer, Translation


def init(
    directory: Annotated[str, option("the project's directory; it is made where there is none", "DIR")],
    /,
    *,
    environment: Annotated[str, option("id of an installed verifiers environment that the project is for")] = "",
    from_files: Annotated[
        tuple[str, ...],
        option(
            "a config of prime-rl (rl.toml, or its files for single components), or arguments of TRL's GRPOConfig: a "
            "YAML, TOML or JSON file, or the command that starts its script, as .sh; nothing of it is run",
            "FILE",
            name="--from",
            consume_multiple=(1, None),
        ),
    ] = (),
) -> int:
    """Make a project that trains; existing files are not overwritten."""
    if environment and from_files:
        raise UsageError("--environment and --from are two ways to begin: give one of them")
    if environment:
        return _for_environment(Path(directory), environment)
    return _from_files(Path(directory), from_files) if from_files else _own_data(Path(directory))


def _own_data(directory: Path) -> int:
    return _write(directory, project.own_data(), "20 steps, some minutes on two cores")


def _for_environment(directory: Path, name: str) -> int:
    files = project.for_environment(name, _facts(name))
    return _write(directory, files, "name your model first: `demo` knows another task")


def _facts(name: str) -> Mapping[str, Any]:
    """Return what can be set of an installed environment. Raises EnvironmentUnavailable where there is none."""
    from configs.environments import EnvironmentConfig
    from tasks.inference.environments.packages import EnvironmentUnavailable, package_version
    from tasks.inference.environments.servers import interface_hint
    from tasks.runtime.process_variables import inherited_variables, module_command

    package_version(EnvironmentConfig(name=name, taskset={"id": name}))
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "facts.json")
        argv = module_command("tasks.inference.environments.describe", name, str(report))
        done = subprocess.run(argv, env=inherited_variables(), capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            hint = interface_hint(last[0])
            raise EnvironmentUnavailable(f"environment {name!r} cannot be loaded: {last[0]}{hint}. Nothing was written")
        facts: Mapping[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return facts


def _from_files(directory: Path, files: Sequence[str]) -> int:
    from flows.exchange.trainers import read_foreign, translate

    trainer, keys = read_foreign(files)
    translation = translate(keys, trainer)
    origin = ", ".join(Path(file).name for file in files)
    head = f"Made of {origin} of {trainer.name}. After each setting are the keys that it came from."
    config = project.of_settings(translation.settings, translation.origins, head)
    outcomes = [*_outcomes(translation, trainer), "", *_to_do(translation)]
    return _write(directory, {project.CONFIG: config, **_data(translation)}, "", outcomes)


def _data(translation: "Translation") -> dict[str, str]:
    """Return the files that the environments of a translated config need beside it."""
    taskset = translation.settings["environments"][0]["taskset"]
    if not _has_our_reward(taskset):
        return {}
    return {project.REWARD: project.PLAIN_REWARD} if "hub" in taskset else project.data_files()


def _has_our_reward(taskset: Mapping[str, Any]) -> bool:
    """Return whether a taskset is the sample's, whose reward function is written beside the config."""
    from flows.exchange.foreign_keys import SAMPLE

    return bool(taskset.get("task") == SAMPLE[0]["taskset"]["task"])


def _outcomes(translation: "Translation", trainer: "ForeignTrainer") -> Iterator[str]:
    """Yield the settings that keys became, and the keys that were not taken over with the reason."""
    from flows.exchange.trainers import one_line

    yield f"taken over: {len(translation.settings)}"
    for key, value in translation.settings.items():
        yield f"  {translation.origins[key]} -> {key} = {one_line(value)}"
        yield from [f"      {trainer.notes[key]}"] if key in trainer.notes else []
    yield f"not taken over: {len(translation.lost)}"
    for keys, why in translation.lost.items():
        yield f"  {keys}"
        yield f"      {why}"
    if translation.off:
        yield f"off there and here: {', '.join(translation.off)}"


def _to_do(translation: "Translation") -> Iterator[str]:
    """Yield what has to be set by hand, or installed, before the config can run."""
    from configs.environments import EnvironmentConfig
    from tasks.inference.engine.model_info import ModelUnusable, renderer_name
    from tasks.inference.environments.packages import EnvironmentUnavailable, package_version

    settings = translation.settings
    path = settings.get("model.path", "")
    if not path:
        yield 'To do: no model is named. Set model.path: a directory or a model of the hub, such as "Qwen/Qwen3-0.6B".'
    elif not Path(path).is_dir():
        try:
            renderer_name(settings.get("model.renderer", ""), path)
        except ModelUnusable as problem:
            yield f"To do: {problem}"
    if "steps" not in settings:
        yield "To do: the number of steps is not given. Set steps; without it, a run makes 20."
    for environment in settings["environments"]:
        if _has_our_reward(environment["taskset"]):
            yield "To do: put your reward into my_reward.py; what is there is a sample."
            if "hub" in environment["taskset"]:
                yield (
                    "To do: name the columns of the dataset in the taskset, prompt_column and answer_column; without "
                    "them they are `prompt` and `answer`."
                )
            continue
        try:
            package_version(EnvironmentConfig(name=environment["name"], taskset=environment["taskset"]))
        except EnvironmentUnavailable as problem:
            yield f"To do: {problem}"


def _write(directory: Path, files: Mapping[str, str], about: str, outcomes: Sequence[str] = ()) -> int:
    """Write a project, and print how it came about and what to do next; `about` is a comment on its first run."""
    project.write(directory, files)
    for line in (*outcomes, f"{directory}: {', '.join(files)}", "Next:"):
        say(line)
    if directory.resolve() != Path.cwd():
        print(f"  cd {directory}")
    print("  stagecoach check config.toml".ljust(36) + "# what it comes to; starts nothing")
    print("  stagecoach run config.toml" + (f"        # {about}" if about else ""))
    print("  stagecoach view".ljust(36) + "# runs, rollouts and rewards in a browser")
    return 0

"""A project to start from: `stagecoach init`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from flows.cli import project
from flows.cli.arguments import UsageError, option
from flows.reporting.formats import say


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
    from configs.environments import EnvironmentConfig
    from tasks.inference.environments.packages import package_version

    outcomes: list[str] = []
    if environment:
        package_version(EnvironmentConfig(name=environment, taskset={"id": environment}))  # or it is refused
        files = project.for_environment(environment)
    elif from_files:
        files, outcomes = _from_files(from_files)
    else:
        files = project.own_data()
    project.write(Path(directory), files)
    for line in (*outcomes, f"{directory}: {', '.join(files)}", "Next:"):
        say(line)
    if Path(directory).resolve() != Path.cwd():
        print(f"  cd {directory}")
    print("  stagecoach check config.toml        # what it comes to, and what is missing; starts nothing")
    print("  stagecoach run config.toml          # the model `demo` knows the sample alone: another task needs yours")
    print("  stagecoach view                     # runs, rollouts and rewards in a browser")
    return 0


def _from_files(sources: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the files of a project made of another trainer's config, and lines that say what became of its keys."""
    from flows.exchange.foreign_keys import SAMPLE
    from flows.exchange.trainers import one_line, read_foreign, translate

    trainer, keys = read_foreign(sources)
    translation = translate(keys, trainer)
    settings, origins = translation.settings, translation.origins
    head = f"Made of {', '.join(Path(source).name for source in sources)} of {trainer.name}."
    files = {project.CONFIG: project.of_settings(settings, origins, f"{head} Comments are the keys of a setting.")}
    taskset = settings["environments"][0]["taskset"]
    if taskset.get("task") == SAMPLE[0]["taskset"]["task"]:  # its reward function stands beside the config
        files |= {project.REWARD: project.PLAIN_REWARD} if "hub" in taskset else project.data_files()
    lines = [f"taken over: {len(settings)}"]
    for key, value in settings.items():
        lines.append(f"  {origins[key]} -> {key} = {one_line(value)}")
        lines += [f"      {trainer.notes[key]}"] if key in trainer.notes else []
    lines.append(f"not taken over: {len(translation.lost)}")
    for names, why in translation.lost.items():
        lines += [f"  {names}", f"      {why}"]
    return files, lines + ([f"off there and here: {', '.join(translation.off)}"] if translation.off else [])

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
            "YAML, TOML or JSON file",
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
    from flows.exchange.trainers import SAMPLE, config_of, one_line, translate

    translation = translate(sources)
    name, environments = translation.table["name"], config_of(translation.settings)["environments"]
    settings = {key: value for key, value in translation.settings.items() if not key.startswith("environments.")}
    origins = {key: translation.origin(key) for key in settings}
    head = (
        f"Made of {', '.join(Path(source).name for source in sources)} of {name}. Comments are the keys of a setting."
    )
    files = {project.CONFIG: project.of_settings(settings | {"environments": environments}, origins, head)}
    taskset = environments[0]["taskset"]
    if taskset.get("task") == SAMPLE["taskset"]["task"]:  # its reward function stands beside the config
        files |= {project.REWARD: project.PLAIN_REWARD} if "hub" in taskset else project.data_files()
    lines = [f"taken over: {len(translation.settings)}"]
    for key, value in translation.settings.items():
        lines.append(f"  {translation.origin(key)} -> {key} = {one_line(value)}")
    lost = translation.lost
    lines.append(f"not translated, see docs/coming-from-{name.lower()}.md: {len(lost)}")
    return files, [*lines, *(f"  {line}" for line in lost)]

"""reward try: what another reward would say of stored rollouts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from flows.cli.arguments import Json, Plain, StoreOption, UsageError, option, stored_run
from flows.cli.output import print_report

if TYPE_CHECKING:
    from configs.run import RunConfig
    from flows.queries.reward_try import TriedReward

MAX_STEPS = 8
"""Steps that a terminal lists."""


def reward(
    action: Annotated[Literal["try"], option("score stored rollouts with another reward", "try")],
    tried: Annotated[
        str, option("import path of a function, judge of the run, or TOML file with one", "FUNCTION|JUDGE")
    ],
    runs: Annotated[tuple[str, ...], option("runs; without any, the newest", "RUN")] = (),
    /,
    *,
    right: Annotated[float, option("rewards from here on are right, for kappa and flips")] = 1.0,
    weight: Annotated[float, option("weight of a function that is added to the recorded reward")] = 1.0,
    output: Annotated[str, option("write a row for each rollout as Parquet", "FILE")] = "",
    adopt: Annotated[str, option("train by it: a regraded replay of the run, of this name", "NAME")] = "",
    store: StoreOption = "",
    as_json: Json = False,
    plain: Plain = False,
) -> int:
    """Score the rollouts for training of runs with another reward, and print what differs.

    Raises ConfigError for a reward that cannot be found, RunUnknown, NotThere for runs without rollouts.
    """
    import polars as pl

    from flows.queries.reward_figures import keep_figures, try_figures
    from flows.queries.reward_try import try_reward
    from flows.reporting.output_files import write_whole

    named = [stored_run(store, name) for name in runs or ["latest"]]
    reader, names = named[0][0], [name for _, name, _ in named]
    if adopt and len(names) > 1:
        raise UsageError("--adopt is of one run: name the run whose rollouts are to be scored and trained on again")
    what = tried_reward(tried, named[0][2], weight)
    rows = pl.concat(try_reward(reader, names, what))
    if output:
        write_whole(Path(output), lambda draft: rows.write_parquet(draft), False)
    changes = settings_of(what, named[0][2])
    figures = try_figures(rows, right)
    for name in names:
        keep_figures(reader.store.root, name, what.name, figures | {"settings": changes, "replaces": what.replaces})
    if as_json:
        print_report(figures | {"settings": changes}, True)
    else:
        _print(figures, what)
        flags = " ".join(f"--set '{line}'" for line in changes)
        print(f"look at it: stagecoach view {names[0]}, page Rewards tried")
        regrade = "" if what.judge else "--regrade "
        print(f"adopt it: stagecoach replay {names[0]} {regrade}{flags} --name NAME")
    if adopt:
        from flows.cli.run import run_replay
        from flows.replays.request import ReplayRequest

        request = ReplayRequest(names[0], "", "", "", tuple(changes), adopt, store, "", what.judge is None, True)
        return run_replay(request, plain)
    return 0


def tried_reward(text: str, config: "RunConfig", weight: float) -> "TriedReward":
    """Return what a text names: a function, a judge of the config, or that of a TOML file. Raises ConfigError."""
    from configs.errors import ConfigError, did_you_mean
    from configs.load import load
    from flows.queries.reward_try import TriedReward, num_arguments
    from tasks.runtime.imports import NotImportable, load_function

    if text.endswith(".toml"):
        judges = load((text,), (), base=config.model_dump(mode="json")).judges
    elif ":" not in text:
        names = [judge.name for judge in config.judges]
        if text not in names:
            raise ConfigError(
                f"{text!r} is no judge of the run{did_you_mean(text, names)} and no import path module:function"
            )
        judges = tuple(judge for judge in config.judges if judge.name == text)
    else:
        try:
            function = load_function(text)
        except NotImportable as error:
            raise ConfigError(str(error)) from error
        if num_arguments(function) > 1 and any(entry.taskset["id"] != "own_data" for entry in config.environments):
            raise ConfigError(
                f"{text!r} takes reply, answer and row, which own data alone has; write a function of a group"
            )
        return TriedReward(text.rpartition(":")[2], function=text, weight=weight)
    if len(judges) != 1:
        raise ConfigError(f"{text}: {len(judges)} judges; name one")
    if not judges[0].url:
        raise ConfigError(
            f"judge {judges[0].name!r} has weights and no `url`: serve it first, and try it by its address"
        )
    return TriedReward(judges[0].name, judge=judges[0], weight=judges[0].weight)


def settings_of(tried: "TriedReward", config: "RunConfig") -> list[str]:
    """Return the settings of a replay that scores with what was tried."""
    from configs.toml_text import toml

    if tried.judge:
        judges = (*(judge for judge in config.judges if judge.name != tried.name), tried.judge)
        return [f"judges={toml([judge.model_dump(mode='json', exclude_defaults=True) for judge in judges])}"]
    places = [f"environments.{place}" for place in range(len(config.environments))]
    if tried.replaces:
        return [f"{place}.taskset.task.scoring={tried.function}" for place in places]
    added = f'{{function="{tried.function}", weight={tried.weight}}}'
    return [f"{place}.group_rewards.{tried.name}={added}" for place in places]


def _print(figures: dict[str, Any], tried: "TriedReward") -> None:
    from flows.cli.output import cell

    steps = figures.pop("by_step")
    shown = steps[:: max(1, -(-len(steps) // MAX_STEPS))]
    way = "in place of the recorded reward" if tried.replaces else f"added to it with weight {tried.weight:g}"
    print(f"{tried.name}, {way}")
    flat: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            first = value.pop("first", [])
            flat[name] = ", ".join(f"{cell('', number)} {key.replace('_', ' ')}" for key, number in value.items())
            flat[f"first_{name}"] = first
        else:
            flat[name] = value
    print_report(flat | {"steps": shown})

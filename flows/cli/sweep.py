"""The command sweep: runs that differ in some settings and in their seed, and a table and a chart of results."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import asdict
from functools import partial
from itertools import chain, product, zip_longest
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

from flows.cli.arguments import Count, Items, Json, Plain, StoreOption, UsageError, open_reader, option, split_items
from flows.reporting.formats import block_rows, console, environment_title, grid, means, say, with_interval
from tasks.evaluation.confidence import students

if TYPE_CHECKING:
    from configs.run import RunConfig
    from flows.cli.race import Race
    from flows.queries.store_reader import StoreReader

Row = dict[str, Any]
Ends = Mapping[str, float] | None
"""The ends of a confidence interval, `low` and `high`."""
FIGURES = ("reward", "held_out", "difference")
WIDTH = 24
"""Characters of a curve."""
LAST_SHARE = 5
"""The reward of a run is the mean of the last of its steps: one in so many, at least one."""


def sweep(
    *items: Items,
    over: Annotated[tuple[str, ...], option("a setting and its values; several options are combined", "KEY=A,B,...")],
    seeds: Annotated[Count, option("runs of each combination, with seeds that follow each other", "N")] = 1,
    fork: Annotated[
        str, option("go on from this step of a recorded run, with its config and seed", "RUN:STEP", name="--from")
    ] = "",
    stop_losers: Annotated[bool, option("end a run early that is worse than another on held-out examples")] = False,
    parallel: Annotated[Count, option("runs at a time, each in a process of its own", "N")] = 1,
    chart: Annotated[str, option("write the page of charts, a line with intervals for each run", "FILE")] = "",
    name: Annotated[str, option("name that begins the names of the runs; `sweep` by default")] = "sweep",
    store: StoreOption = "",
    as_json: Json = False,
    plain: Plain = False,
) -> int:
    """Train a run for each combination of settings and seed, and print how they compare; return 1 where one failed.

    All configs are checked before the first run starts. The same call again resumes: what is recorded is not computed
    again, and more values or seeds are added to it. Raises UsageError, ConfigError.
    """
    from flows.cli.demo import demo_model
    from flows.cli.race import races
    from flows.cli.run import run_with_panel
    from flows.viewer.addresses import curves
    from flows.viewer.routes import save_page

    files, overrides = split_items(items)
    overrides += [f"fork={json.dumps(fork)}"] if fork else []
    arms = combinations(over)
    first_seed = _checked_seed(files, overrides, arms, store, is_fork=bool(fork))
    runner = partial(run_with_panel, plain=plain or as_json or parallel > 1)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        overrides += [] if fork else demo_model("train", files, overrides, store, runner)
        configs = arm_configs(files, overrides, arms, range(first_seed, first_seed + seeds), name, store)
        in_race = races(configs) if stop_losers else {}
        call = partial(run_arm, runner, in_race)
        with ThreadPoolExecutor(parallel) as threads:
            calls = threads.map(partial(_run_apart, call), configs) if parallel > 1 else map(call, configs)
            finished = [config.name for config, success in zip(configs, calls, strict=True) if success]
        reader = open_reader(configs[0].store)
        ended = {run: race.loss() for run, race in in_race.items() if reader.store.runs.last_event(run) != "finished"}
        of_arms = [dict(enumerate(run_names(name, arm, seeds))) for arm in arms]
        by_arm = [{seed: run for seed, run in of_arm.items() if run in finished} for of_arm in of_arms]
        rows = results(reader, arms, by_arm, ended)
        if chart and finished:
            say(save_page(reader, curves(*finished[:8]), Path(chart), force=True))
    if as_json:
        print(json.dumps(rows))
    else:
        print_results(rows, finished)
    return int(len(finished) < len(configs))


def run_arm(runner: Callable[..., object], in_race: Mapping[str, "Race"], config: "RunConfig") -> bool:
    """Run a config to its end, or until it has lost its race; return whether it did not fail."""
    race = in_race.get(config.name)
    try:
        if not (race and race.loss()):
            runner(config, watchers=(partial(race.watch, config.steps),) if race else ())
    except Exception as error:  # the other runs are worth having
        if not (race and race.loss()):
            say(f"{config.name} failed: {error}; the others are safe, and the same sweep again resumes it")
            return False
    return True


def _run_apart(call: Callable[["RunConfig"], bool], config: "RunConfig") -> bool:
    """Return what `call` returns in a process of its own."""
    process = get_context("spawn").Process(target=_call_apart, args=(call, config))
    process.start()
    process.join()
    if process.exitcode not in (0, 1):
        say(f"the process of {config.name} ended with status {process.exitcode}; the same sweep again resumes it")
    return process.exitcode == 0


def _call_apart(call: Callable[["RunConfig"], bool], config: "RunConfig") -> None:
    """End this process with what `call` returns, or in order, as at SIGTERM, once the parent process is gone."""

    def follow(parent: Any) -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=follow, args=(parent_process(),), daemon=True).start()
    with redirect_stdout(sys.stderr), suppress(KeyboardInterrupt):
        sys.exit(not call(config))
    sys.exit(1)


def combinations(over: Sequence[str]) -> list[dict[str, str]]:
    """Return every combination of the values of some settings, the last setting changing first.

    A comma within brackets, braces or quotes is part of a value. Raises UsageError for what names no values.
    """
    settings: dict[str, list[str]] = {}
    for text in over:
        key, equals, values = text.partition("=")
        parts = re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|\"[^\"]*\"|[^,])+", values)
        if not (key and equals and parts) or key in settings or key in ("seed", "name", "store"):
            raise UsageError(f"--over {text}: name each setting once, as --over training.learning_rate=1e-5,1e-4")
        settings[key] = parts
    return [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]


def run_names(name: str, arm: Mapping[str, str], seeds: int) -> list[str]:
    """Return the names of the runs of a combination, one for each seed: they do not depend on other combinations."""
    words = [re.sub(r"[^A-Za-z0-9._-]+", "_", value).strip("_") for value in arm.values()]
    return ["-".join([name, *words, f"s{number}"]) for number in range(seeds)]


def _checked_seed(
    files: Sequence[str], overrides: Sequence[str], arms: Sequence[Mapping[str, str]], store: str, is_fork: bool
) -> int:
    """Return the first seed, that of the config or 0, after every combination was checked: before a model is made."""
    from flows.runtime.resolve_run import nothing_started, requested_config, resolve_run

    if len({*chain(*(run_names("", arm, 1) for arm in arms))}) < len(arms):
        raise UsageError("two combinations of --over have the same values but for signs: name each value once")
    with nothing_started():
        # Without files a fork has the config of its run, which the store knows.
        check = partial(resolve_run, store=store) if is_fork and not files else partial(requested_config, settings={})
        requested = [check("train", files, [*overrides, *_settings(arm)]) for arm in arms]
    return requested[0].seed or 0


def _settings(arm: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in arm.items()]


def arm_configs(
    files: Sequence[str],
    overrides: Sequence[str],
    arms: Sequence[Mapping[str, str]],
    seeds: Sequence[int],
    name: str,
    store: str,
) -> list["RunConfig"]:
    """Return the resolved configs of all runs: all combinations of the first seed, then of the next.

    Raises what `resolve_run` raises.
    """
    from flows.runtime.resolve_run import resolve_run

    names = [run_names(name, arm, len(seeds)) for arm in arms]
    return [
        resolve_run("train", files, [*overrides, *_settings(arm)], name=of_arm[number], store=store, seed=seed)
        for number, seed in enumerate(seeds)
        for arm, of_arm in zip(arms, names, strict=True)
    ]


def results(
    reader: "StoreReader",
    arms: Sequence[Mapping[str, str]],
    by_arm: Sequence[Mapping[int, str]],
    ended: Mapping[str, str] = {},
) -> list[Row]:
    """Return a row for each combination and held-out set, or one for each combination where nothing was evaluated.

    `by_arm` has the runs of each combination by number of the seed, `ended` why runs were ended early. Columns:
    `settings`; `runs` (names); `ended` (those of its runs); `rewards` by step, means over the runs; `reward` of the
    last steps; `set`, `environment` and `held_out`, the average of the last policy; `difference`, to the first
    combination by seed over the same examples, of the last policies or, where one was ended early, of the last that
    both have. Figures have `value`, a mean over the runs, and `interval` with `low` and `high`: Student's over the
    runs, of a single run or pair that over its examples; null where nothing can be said.
    """
    from flows.queries.runs import runs

    rewards = {row["run"]: row["rewards"] for row in runs(reader).iter_rows(named=True)}
    rows: list[Row] = []
    for arm, names in zip(arms, by_arm, strict=True):
        curves = [rewards[name] for name in names.values()]
        last = [_mean(curve[-max(1, len(curve) // LAST_SHARE) :]) for curve in curves]
        about = {
            "settings": dict(arm),
            "runs": list(names.values()),
            "ended": {run: ended[run] for run in names.values() if ended.get(run)},
            "rewards": [_mean(values) for values in zip_longest(*curves)],
            "reward": _figure([(value, None) for value in last if value is not None]),
        }
        baseline = by_arm[0] if names is not by_arm[0] else {}
        rows += [about | row for row in _held_out(reader, names, baseline, ended)] or [about]
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def _figure(figures: Sequence[tuple[float, Ends]]) -> Row | None:
    """Return the mean of a figure over runs, given with the interval of each, and its own interval."""
    if not figures:
        return None
    values = [value for value, _ in figures]
    across, (_, single) = students(values), figures[0]
    interval = single if len(figures) == 1 else across and asdict(across)
    return {"value": fmean(values), "interval": interval}


def _held_out(
    reader: "StoreReader", runs: Mapping[int, str], baseline: Mapping[int, str], ended: Mapping[str, str]
) -> list[Row]:
    """Return by set and environment the scores of the last policies, and their difference to those of `baseline`."""
    from flows.queries.compare import compared_evaluations

    places: dict[tuple[str, str], tuple[list[tuple[float, Ends]], ...]] = {}
    for seed, run in runs.items():
        before = baseline.get(seed, run)
        compared = compared_evaluations(reader, before, run).filter(figure="avg").drop_nulls("b")
        if ended.get(run) or ended.get(before):
            compared = compared.filter(version_a=compared["version_b"])
        ordered = compared.sort("version_b", maintain_order=True)
        last = ordered.unique(["set", "environment"], keep="last", maintain_order=True)
        for row in last.iter_rows(named=True):
            scores, differences = places.setdefault((row["set"], row["environment"]), ([], []))
            scores.append((row["b"], None))
            if before != run:
                ends = {end: row[end] for end in ("low", "high")}
                differences.append((row["difference"], None if row["low"] is None else ends))
    return [
        {"set": name, "environment": environment, "held_out": _figure(scores), "difference": _figure(differences)}
        for (name, environment), (scores, differences) in places.items()
    ]


def print_results(rows: Sequence[Row], runs: Sequence[str]) -> None:
    """Print a table of results with a curve of rewards for each combination, all on one scale, and where charts are."""
    for run, reason in {run: reason for row in rows for run, reason in row["ended"].items()}.items():
        say(f"{run} was ended early: {reason}; to go on: stagecoach resume {run}")
    known = [reward for row in rows for reward in row["rewards"] if reward is not None]
    bounds = min(known, default=0.0), max(known, default=0.0)
    cells = [
        [
            *row["settings"].values(),
            environment_title(row.get("set", ""), row.get("environment", "-")),
            str(len(row["runs"])),
            *(with_interval((figure := row.get(name) or {}).get("value"), figure) for name in FIGURES),
            block_rows(means(row["rewards"], WIDTH), *bounds)[0],
        ]
        for row in rows
    ]
    settings = list(rows[0]["settings"])
    headings = [*settings, "environment", "runs", *(name.replace("_", " ") for name in FIGURES), "reward by step"]
    console().print(grid(headings, cells, left=range(len(settings) + 1)))
    if runs:
        first, *others = runs
        console().print(f"charts: stagecoach view, then /runs/{first}" + f"?with={','.join(others[:7])}" * bool(others))

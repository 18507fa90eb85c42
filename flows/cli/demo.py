"""The demo: a small model that is made, warmed up and trained; the weights that `model.path = "demo"` means."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from configs.errors import did_you_mean
from configs.load import load
from configs.run import RunConfig
from configs.store import default_store
from flows.cli.arguments import UsageError
from flows.reporting.messages import outcome_message
from flows.runtime.demo_sources import FIRST, SEED, Recipe, demo_presets, demo_weights, warmed_weights
from flows.runtime.machine_facts import config_versions
from flows.runtime.resolve_run import nothing_started, resolve_run

RunFunction = Callable[[RunConfig], dict[str, Any]]
"""Runs a resolved config and returns its outcome."""


def warm_up(
    run: RunFunction,
    *,
    name: str,
    presets: Sequence[str],
    model: str,
    data: str,
    seed: int,
    overrides: Sequence[str],
    advanced: Mapping[str, str],
) -> Mapping[str, Any]:
    """Call `run` with the config of the warm-up; the other parameters are those of the flow `sft`."""
    print(f"The run {name} warms up the demo's model; later runs find it in the store.")
    settings = {"name": name, "store": advanced["store"], "seed": seed, "model.path": model, "data.path": data}
    return run(resolve_run("sft", presets, overrides, **settings))


def train_demo(
    presets: Sequence[str], overrides: Sequence[str], name: str, store: str, run: RunFunction
) -> tuple[RunConfig, dict[str, Any]]:
    """Make the demo's model, warm it up and train it; return config and outcome of the training.

    Before the minutes of the warm-up it raises UsageError for presets that are not one with a demo, ConfigError for a
    wrong config or a missing function, and EnvironmentUnavailable for an environment that is not installed.
    """
    with_demo = demo_presets()
    if len(presets) > 1 or not {*presets} <= {*with_demo}:
        near, names = did_you_mean(presets[0], with_demo), ", ".join(with_demo)
        raise UsageError(f"demo takes one of {names}, not {' '.join(presets)}; `stagecoach run` takes files{near}")
    preset = (*presets, FIRST)[0]
    name, root = name or preset, store or default_store()
    with nothing_started():
        loaded = load([preset], [f"seed={SEED}", *overrides, "model.path=", f"name={name}", f"store={root}"])
        config_versions(loaded)
    weights = warmed_weights(root, partial(warm_up, run), preset, f"{name}-warm-up")
    settings = [f"model.path={weights}", *overrides]
    config = resolve_run("train", [preset], settings, name=name, store=root, seed=loaded.seed)
    return config, run(config)


def demo_model(kind: str, files: Sequence[str], overrides: Sequence[str], store: str, run: RunFunction) -> list[str]:
    """Return the override that names the demo's weights where a config has the model `demo`; makes missing weights."""
    if kind in ("sft", "dpo") or not files:
        return []
    with nothing_started():
        address = [f"store={store}"] if store else []
        weights = demo_weights(load(files, [*overrides, f"kind={kind}", *address]), partial(warm_up, run))
        return [f"model.path={weights}"] if weights else []


def demo_summary(outcome: dict[str, Any], config: RunConfig, recipe: Recipe, seconds: float) -> list[str]:
    """Return the lines that end the demo: what was learnt, where the tables are, what to try next."""
    store = "" if config.store == default_store() else f" --store {shlex.quote(config.store)}"
    # A person looks for a directory, wherever the command was given.
    place = config.store if "://" in config.store else Path(config.store).resolve()
    return [
        "",
        f"{recipe.about}: {outcome_message(outcome)}; {seconds:.0f} s.",
        f"Every rollout, verdict, advantage, batch and weight is in {place}.",
        "Try next:",
        f"  stagecoach view --run {config.name}{store}",
        f"  stagecoach show {config.name}{store}",
        f"  stagecoach replay {config.name}{store} --set {recipe.try_next}",
        f"  stagecoach resume {config.name}{store} steps={config.steps + 5}",
    ]

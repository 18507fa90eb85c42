"""The demo: a small model that is made, warmed up and trained; the weights that `model.path = "demo"` means."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.load import load
from configs.resolve import resolve
from configs.run import RunConfig
from configs.store import default_store
from flows.cli.launch import watch
from flows.reporting.formats import describe_difference, describe_scores
from flows.reporting.messages import result_lines
from flows.runtime.demo_sources import DEMO, SEED, Recipe, WarmUp, demo_weights, warmed_weights
from flows.runtime.machine_facts import config_versions
from flows.runtime.preflight import require_fit
from flows.runtime.resolve_run import nothing_started, resolve_run
from flows.runtime.session import log_directory
from flows.services.base import Supervisor
from flows.services.engine import InferenceService
from flows.services.environments import EnvironmentServers
from storage.store import open_store
from tasks.runtime.run_context import RunContext


def warm_up_run(plain: bool, begin: Callable[[str], None] = lambda run: None) -> WarmUp:
    """Return a function that runs a supervised run with a panel; `begin` is called with its name before."""

    def sft(
        name: str,
        presets: Sequence[str],
        model: str,
        data: str,
        seed: int,
        overrides: Sequence[str],
        advanced: Mapping[str, str],
    ) -> Mapping[str, Any]:
        begin(name)
        settings = {"name": name, "store": advanced["store"], "seed": seed, "model.path": model, "data.path": data}
        return watch(resolve_run("sft", presets, overrides, **settings), plain)

    return sft


def train_demo(
    preset: str, overrides: Sequence[str], name: str, store: str, plain: bool
) -> tuple[RunConfig, dict[str, Any]]:
    """Make the demo's model, warm it up and train it; return config and outcome of the training."""
    name, root = name or preset, store or default_store()
    loaded = demo_config(preset, overrides, name, root)
    with nothing_started():  # before the minutes of the warm-up
        resolved = resolve(loaded, config_versions(loaded))
        context = RunContext(open_store(root), name, resolved, {})
        with Supervisor(name, log_directory(resolved)) as supervisor:
            engine = InferenceService(supervisor, context, Path())
            environments = EnvironmentServers(supervisor, resolved, engine.key)
            for service in (engine, environments):
                service.check_available()
            if overrides:
                require_fit(resolved, environments.load())
    weights = warmed_weights(root, warm_up_run(plain), preset, f"{name}-warm-up")
    config = resolve_run(
        "train", [preset], [f"model.path={weights}", *overrides], name=name, store=root, seed=loaded.seed
    )
    return config, watch(config, plain)


def demo_config(preset: str, overrides: Sequence[str], name: str, root: str) -> RunConfig:
    """Return the config of a demo's training before its model exists; a seed among the overrides counts."""
    return load([preset], [f"seed={SEED}", *overrides, "model.path=", f"name={name}", f"store={root}"])


def demo_model(kind: str, files: Sequence[str], overrides: Sequence[str], store: str, plain: bool) -> list[str]:
    """Return the override that names the demo's weights where a config has the model `demo`; makes missing weights."""

    def announce(run: str) -> None:
        print(f"The model `{DEMO}` is made and warmed up first, by the run {run}; later runs find it in the store.")

    if kind == "sft" or not files:
        return []
    with nothing_started():
        address = [f"store={store}"] if store else []
        weights = demo_weights(load(files, [*overrides, f"kind={kind}", *address]), warm_up_run(plain, announce))
        return [f"model.path={weights}"] if weights else []


def demo_summary(outcome: dict[str, Any], config: RunConfig, recipe: Recipe, seconds: float) -> list[str]:
    """Return the lines that end the demo: what was learnt, where the tables are, what to try next."""
    lines = ["", *(f"{recipe.about}: {line}." for line in result_lines(outcome["steps"]))]
    for evaluation in outcome["evaluations"]:
        scores = "; ".join(describe_scores(score) for score in evaluation["scores"])
        lines.append(f"Held-out examples, policy {evaluation['version']}: {scores}")
    lines += [describe_difference(row) for row in outcome.get("comparisons", ()) if row["figure"] == "avg"]
    done = f"{outcome['num_computed']} pieces of work computed, {outcome['num_found']} cached"
    store = "" if config.store == default_store() else f" --store {config.store}"
    # A person looks for a directory, wherever the command was given.
    place = config.store if "://" in config.store else Path(config.store).resolve()
    return [
        *lines,
        f"{done}; {seconds:.0f} s.",
        f"Every rollout, verdict, advantage, batch and weight is in {place}.",
        "Try next:",
        f"  stagecoach view --run {config.name}{store}",
        f"  stagecoach show {config.name}{store}",
        f"  stagecoach show {config.name}{store} {recipe.try_next}",
        f"  stagecoach resume {config.name}{store} steps={config.steps + 5}",
    ]

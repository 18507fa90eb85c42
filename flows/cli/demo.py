"""Runs the demo: makes a small model and demonstrations, warms it up and trains it on this machine."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.load import load
from configs.resolve import resolve
from configs.run import RunConfig
from flows.cli.launch import watch
from flows.reporting.events import describe_scores
from flows.reporting.formats import describe_difference
from flows.runtime.demo_sources import FIRST, RECIPES, SEED, Recipe, build, sources_directory, warm_weights
from flows.runtime.prepare import prepare
from flows.runtime.session import log_directory
from flows.runtime.versions import config_versions, versions
from flows.services.base import Supervisor
from flows.services.engine import InferenceService
from storage.store import open_store
from tasks.runtime.run_context import RunContext


def main(
    preset: str = FIRST, overrides: Sequence[str] = (), name: str = "", store: str = "", plain: bool = False
) -> int:
    """Run the demo of a preset, print what was learnt and what to try next; return the exit status.

    Takes up the demo of that name where it stopped. `overrides` are for the reinforcement learning; `plain` asks for
    plain lines on a terminal too.
    """
    began = time.monotonic()
    name, root, recipe = name or preset, store or RunConfig().store, RECIPES[preset]
    open_store(root)  # before anything else lies there: a store is made in an empty directory
    sources = build(sources_directory(root, preset), recipe)
    settings = [*sources.overrides, *recipe.warm_up]
    warm_up = prepare("sft", ["sft_demo"], settings, name=f"{name}-warm-up", store=root, seed=SEED)
    with Supervisor(name, log_directory(warm_up)) as supervisor:
        engine = early_engine(supervisor, preset, [*overrides, f"model.path={sources.model}"], name, root)
        engine.reach()
        policy = watch(warm_up, before=engine.begin, plain=plain)["policy"]
        weights = warm_weights(root, policy["key"])
        config = prepare("train", [preset], [f"model.path={weights}", *overrides], name=name, store=root, seed=SEED)
        outcome = watch(config, engine=engine, plain=plain)
    print("\n".join(summary(outcome, config, recipe, time.monotonic() - began)))
    return 0


def early_engine(
    supervisor: Supervisor, preset: str, overrides: Sequence[str], name: str, root: str
) -> InferenceService:
    """Return the engine of the training run, able to start before its first policy exists.

    Start-up is the engine's longest wait; it goes on beside the warm-up, with weights of the same shape.
    """
    asked = load([preset], [*overrides, f"name={name}", f"store={root}", f"seed={SEED}"])
    config = resolve(asked, config_versions(asked))
    return InferenceService(
        supervisor, RunContext(open_store(root), name, config, versions(config)), Path(asked.model.path)
    )


def summary(outcome: dict[str, Any], config: RunConfig, recipe: Recipe, seconds: float) -> list[str]:
    """Return the lines that end the demo: what was learnt, where the tables are, what to try next."""
    rewards = [step["reward"] for step in outcome["steps"]]
    last = rewards[-3:]
    lines = [
        "",
        f"{recipe.about}: mean reward {rewards[0]:.2f} in the first step, "
        f"{sum(last) / len(last):.2f} over the last {len(last)}.",
    ]
    for found in outcome["evaluations"]:
        scores = "; ".join(describe_scores(each) for each in found["scores"])
        lines.append(f"Held-out examples, policy {found['version']}: {scores}")
    lines += [describe_difference(row) for row in outcome.get("comparisons", ()) if row["figure"] == "avg"]
    done = f"{outcome['num_computed']} pieces of work were computed, {outcome['num_found']} were in the ledger"
    store = "" if config.store == RunConfig().store else f" --store {config.store}"
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

"""The demo: makes a small model and demonstrations, warms it up and trains it on this machine."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.load import load
from configs.resolve import resolve
from configs.run import RunConfig
from flows.reporting.events import describe_scores
from flows.reporting.formats import describe_difference
from flows.runtime.demo_recipes import RECIPES, SEED, Recipe
from flows.runtime.launch import watch
from flows.runtime.prepare import prepare
from flows.runtime.session import log_directory
from flows.runtime.versions import config_versions, versions
from flows.services.base import Supervisor
from flows.services.engine import InferenceService
from storage.store import open_store
from tasks.runtime.run_context import RunContext

FIRST = "demo"
"""The preset whose sources lie at the top; those of others lie below, by the preset's name."""


class SourceFailed(ValueError):
    """What the demo starts from could not be made."""


class Sources:
    """What a demo starts from: a directory with a random model, and a file of demonstrations."""

    def __init__(self, directory: Path) -> None:
        self.model = directory / "model"
        self.demonstrations = directory / "demonstrations.jsonl"
        self.words = directory / "words.json"

    @property
    def overrides(self) -> list[str]:
        """The settings that name them."""
        return [f"model.path={self.model}", f"data.path={self.demonstrations}"]


def sources_directory(root: str, preset: str = FIRST) -> Path:
    """Return where the sources of a store's demo lie: in the store where that is local."""
    top = (Path(".stagecoach") if "://" in root else Path(root).expanduser()).resolve() / "sources"
    return top if preset == FIRST else top / preset


def build(directory: Path, recipe: Recipe = RECIPES[FIRST]) -> Sources:
    """Make the model and the demonstrations, unless they are there; each is complete or absent.

    Raises SourceFailed.
    """
    sources = Sources(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if not (sources.model.is_dir() and sources.demonstrations.is_file()):
        _demonstrate(sources, recipe)
    if not sources.model.is_dir():
        draft = _draft(sources.model)
        _run("tasks.learner.tiny", str(draft), *recipe.model.split(), "--words", str(sources.words))
        draft.rename(sources.model)
    return sources


def _demonstrate(sources: Sources, recipe: Recipe) -> None:
    """Write the demonstrations of all environments into one file, and their words into another."""
    rows, words = _draft(sources.demonstrations), []
    for package, *arguments in map(str.split, recipe.demonstrations):
        part, told = _draft(rows.with_name(f"{package}.jsonl")), _draft(rows.with_name(f"{package}.json"))
        _run(f"{package}.demonstrations", str(part), "--words", str(told), *arguments)
        with rows.open("ab") as file:
            file.write(part.read_bytes())
        words += json.loads(told.read_text(encoding="utf-8"))
        part.unlink()
        told.unlink()
    sources.words.write_text(json.dumps(words), encoding="utf-8")
    rows.rename(sources.demonstrations)


def _draft(path: Path) -> Path:
    draft = path.with_name(f"{path.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.unlink(missing_ok=True)
    return draft


def _run(module: str, *arguments: str) -> None:
    """Run a module in a process of its own: the flow's process loads neither torch nor environments."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SourceFailed(
            f"{module} failed: {done.stderr.strip()[-2000:]}\nNothing was stored. `stagecoach doctor` says what this "
            f"machine lacks"
        )


def warmed_up(root: str, key: str) -> Path:
    """Return a directory with the warm-up's weights that stays: in the store, or beside the sources for a URL.

    What an object store hands out is a copy that gives way to newer ones.
    """
    weights = open_store(root).policies.directory(key)
    if "://" not in root:
        return weights
    kept = sources_directory(root) / key
    if not kept.is_dir():
        shutil.copytree(weights, draft := kept.with_name(f".{key}"), dirs_exist_ok=True)
        draft.rename(kept)
    return kept


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
        weights = warmed_up(root, policy["key"])
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

"""Makes what the demo starts from: a small model, demonstrations, and weights that were warmed up on them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.load import load
from configs.run import RunConfig
from flows.runtime.demo_recipes import RECIPES, SEED, Recipe
from storage.store import Store, open_store

DEMO = "demo"
"""What a flow calls the demo's weights."""
WARM_UP = "demo-warm-up"
"""The run that warms the demo's model up."""
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


def weights_of(model: str, store: str, sft: Callable[..., Any]) -> str:
    """Return the directory or hub id of the weights that `model` names; `demo` is made in the store where need be.

    `sft` is the flow that warms the demo's model up.
    """
    return demo_policy(store or RunConfig().store, sft) if model == DEMO else model


def demo_policy(root: str, sft: Callable[..., Any]) -> str:
    """Return the weights that the demo starts from: a small model, warmed up on demonstrations by the flow `sft`.

    The first call in a store takes the minutes of the warm-up, in a run of its own that `stagecoach demo` has too.
    """
    store = open_store(root)  # before anything else lies there: a store is made in an empty directory
    if not (key := _last_policy(store)):
        sources = build(sources_directory(root))
        sft(
            name=WARM_UP,
            presets=["sft_demo"],
            model=str(sources.model),
            data=str(sources.demonstrations),
            seed=SEED,
            store=root,
        )
        key = _last_policy(store)
    return str(warmed_up(root, key))


def _last_policy(store: Store) -> str:
    """Return the key of the warm-up's last policy; empty where it is not finished."""
    trained = {entry.step: entry.key for entry in store.ledger.entries(run=WARM_UP, stage="training")}
    return trained.get(load(["sft_demo"]).steps - 1, "")

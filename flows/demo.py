"""Demo: a small model learns to reverse text, from nothing, on this machine.

Builds a model, warms it up on noisy demonstrations, and trains it with reinforcement learning through the real engine,
environment server, tables and scheduler. Run again, it finds its work in the ledger.
"""

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
from flows.facts import facts, versions
from flows.launch import watch
from flows.prepare import prepare
from flows.processes.services import Supervisor
from flows.rooms import EngineRoom
from flows.session import log_directory
from flows.watchers import describe_scores
from storage.store import open_store
from tasks.stage import Place

SEED = 17
# What the tokenizer keeps whole: the words of every prompt, so that samples are short and training is fast.
WORDS = ("user", "assistant", "Reverse inside ", "<rev>", "</rev>", ": ", "\n\n")
# Heads of 32: the engine has no CPU kernel for smaller ones.
MODEL = [
    "--hidden",
    "96",
    "--layers",
    "3",
    "--heads",
    "3",
    "--kv-heads",
    "3",
    *(part for word in WORDS for part in ("--word", word)),
]
# Most demonstrations are wrong, so that the warmed-up model knows all the forms and not yet which one pays.
DEMONSTRATIONS = ["--count", "38400", "--right", "0.14", "--untagged", "0.70", "--max-length", "5", "--seed", "1"]


def main(overrides: Sequence[str] = (), name: str = "", store: str = "", plain: bool = False) -> int:
    """Run the demo, print what was learnt and what to try next; return the exit status.

    Takes up the demo of that name where it stopped. `overrides` are for the reinforcement learning; `plain` asks for
    plain lines on a terminal too.
    """
    began = time.monotonic()
    name, root = name or "demo", store or RunConfig().store
    open_store(root)  # before anything else lies there: a store is made in an empty directory
    sources = build(sources_directory(root))
    warm_up = prepare("sft", ["sft_demo"], sources.overrides, name=f"{name}-warm-up", store=root, seed=SEED)
    with Supervisor(name, log_directory(warm_up)) as supervisor:
        engine = early_engine(supervisor, overrides, name, root, sources.model)
        engine.reach()
        policy = watch(warm_up, before=engine.begin, plain=plain)["policy"]
        weights = warmed_up(root, policy["key"])
        config = prepare("train", ["demo"], [f"model.path={weights}", *overrides], name=name, store=root, seed=SEED)
        outcome = watch(config, engine=engine, plain=plain)
    print("\n".join(summary(outcome, config, time.monotonic() - began)))
    return 0


class SourceFailed(ValueError):
    """What the demo starts from could not be made."""


class Sources:
    """What the demo starts from: a directory with a random model, and a file of demonstrations."""

    def __init__(self, directory: Path) -> None:
        self.model = directory / "model"
        self.demonstrations = directory / "demonstrations.jsonl"

    @property
    def overrides(self) -> list[str]:
        """The settings that name them."""
        return [f"model.path={self.model}", f"data.path={self.demonstrations}"]


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


def sources_directory(root: str) -> Path:
    """Return where the sources of a store's demo lie: in the store where that is local."""
    return (Path(".stagecoach") if "://" in root else Path(root).expanduser()).resolve() / "sources"


def build(directory: Path) -> Sources:
    """Make the model and the demonstrations, unless they are there; both are complete or absent."""
    sources = Sources(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if not sources.model.is_dir():
        draft = _draft(sources.model)
        _run("tasks.learner.tiny", str(draft), *MODEL)
        draft.rename(sources.model)
    if not sources.demonstrations.is_file():
        draft = _draft(sources.demonstrations)
        _run("reverse_text.demonstrations", str(draft), *DEMONSTRATIONS)
        draft.rename(sources.demonstrations)
    return sources


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


def early_engine(supervisor: Supervisor, overrides: Sequence[str], name: str, root: str, model: Path) -> EngineRoom:
    """Return the engine room of the training run, able to start before its first policy exists.

    Start-up is the engine's longest wait; it goes on beside the warm-up, with weights of the same shape.
    """
    asked = load(["demo"], [*overrides, f"model.path={model}", f"name={name}", f"store={root}", f"seed={SEED}"])
    config = resolve(asked, facts(asked))
    return EngineRoom(supervisor, Place(open_store(root), name, config, versions(config)), model)


def summary(outcome: dict[str, Any], config: RunConfig, seconds: float) -> list[str]:
    """Return the lines that end the demo: what was learnt, where the tables are, what to try next."""
    rewards = [step["reward"] for step in outcome["steps"]]
    last = rewards[-3:]
    lines = [
        "",
        f"The model learnt to reverse text inside tags: mean reward {rewards[0]:.2f} in the first step, "
        f"{sum(last) / len(last):.2f} over the last {len(last)}.",
    ]
    for found in outcome["evaluations"]:
        scores = "; ".join(describe_scores(each) for each in found["scores"])
        lines.append(f"Held-out examples, policy {found['version']}: {scores}")
    done = f"{outcome['num_computed']} pieces of work were computed, {outcome['num_found']} were in the ledger"
    store = "" if config.store == RunConfig().store else f" --store {config.store}"
    place = config.store if "://" in config.store else Path(config.store).resolve()
    return [
        *lines,
        f"{done}; {seconds:.0f} s.",
        f"Every rollout, verdict, advantage, batch and weight is in {place}.",
        "Try next:",
        f"  stagecoach show {config.name}{store}",
        f"  stagecoach show {config.name}{store} algorithm.normalise_std=true",
        f"  stagecoach resume {config.name}{store} steps={config.steps + 5}",
    ]

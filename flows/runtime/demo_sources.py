"""What each demo starts from: a small model, demonstrations, and weights that were warmed up on them.

The environment's package says the rest: `python -m PACKAGE.demonstrations FILE --words FILE` writes the demonstrations,
and the texts that the model's tokenizer shall keep whole.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.load import load
from configs.run import RunConfig
from flows.runtime.versions import config_versions
from storage.roots import check_links
from storage.store import Store, open_store
from tasks.runtime.imports import load_function
from tasks.runtime.process_variables import inherited_variables
from tasks.runtime.start_module import module_command

DEMO = "demo"
"""What a flow calls the demo's weights."""
WARM_UP = "demo-warm-up"
"""The run that warms the demo's model up."""
FIRST = "demo"
"""The preset whose sources lie at the top; those of others lie below, by the preset's name."""


SEED = 17
# Heads of 32: the engine has no CPU kernel for smaller ones.
MODEL = {"hidden": 96, "layers": 3, "heads": 3, "kv_heads": 3}
# So that a conversation of several turns is one training sample: the renderer then keeps what it put into a turn.
NO_THOUGHTS = "model.renderer_settings={enable_thinking=false}"
# Conversations of several turns are long: as many tokens as the one-line demonstrations of `demo`, in fewer rows.
SHORT = ("steps=6", "assignment.groups_per_step=800", "training.decay_steps=300", "training.learning_rate=3e-3")
# One step of many updates: each step goes through all stages, and stores what it made.
QUICK = (
    "steps=1",
    "assignment.groups_per_step=32000",
    "packing.updates_per_step=500",
    "training.decay_steps=500",
    "training.learning_rate=3e-3",
    "training.betas=[0.9,0.98]",
)
WITH_PICTURES = (
    *("model.renderer=qwen3-vl", "training.vision=trained", "steps=1", "assignment.groups_per_step=8000"),
    *("packing.updates_per_step=250", "training.decay_steps=250", "training.betas=[0.9,0.98]"),
)


@dataclass(frozen=True)
class Recipe:
    """How the model that a preset trains comes about, and what to say when it is trained."""

    about: str
    """What the run was about: the beginning of the summary's first sentence."""
    demonstrations: tuple[str, ...]
    """For each environment its package and, after spaces, arguments for the package's `demonstrations`."""
    warm_up: tuple[str, ...] = ()
    """Overrides of the warm-up, which is the preset `sft_demo`."""
    model: Mapping[str, int] = field(default_factory=lambda: MODEL)
    """The sizes of the model."""
    maker: str = "tasks.learner.tiny:tiny_qwen3"
    """The function that makes it in a directory."""
    try_next: str = "algorithm.normalise_std=true"
    """A setting that `stagecoach show` may be asked about."""


RECIPES: Mapping[str, Recipe] = {
    # Most demonstrations are wrong, so that the warmed-up model knows all the forms and not yet which one pays.
    "demo": Recipe(
        "The model was trained to reverse text inside tags",
        ("sample_reverse_text --count 6400 --right 0.20 --untagged 0.77 --max-length 5 --seed 1",),
        (
            *(NO_THOUGHTS, *QUICK, "assignment.groups_per_step=6400"),
            *("packing.updates_per_step=200", "training.decay_steps=200"),
        ),
    ),
    "two_environments": Recipe(
        "The model was trained to reverse text inside tags and to look things up with a tool",
        ("sample_lookup", "sample_reverse_text --count 4096 --max-length 5"),
        (NO_THOUGHTS,),
    ),
    "calc_tools": Recipe(
        "The model was trained to work out a chain of operations with a calculator",
        ("sample_calc_tools --count 4800",),
        (NO_THOUGHTS, *SHORT),
    ),
    "wikispeedia": Recipe(
        "The model was trained to find its way from topic to topic",
        ("sample_wikispeedia --count 32000 --num-topics 12 --right 0.3 --back 0.2",),
        (NO_THOUGHTS, *QUICK, "packing.updates_per_step=1000", "training.decay_steps=1000"),
    ),
    "looking": Recipe(
        "The model was trained to count the squares of a picture",
        ("sample_looking --count 8000 --right 0.3",),
        WITH_PICTURES,
        model={},
        maker="tasks.learner.tiny_vision:tiny_qwen3_vl",
    ),
    "looking_tool": Recipe(
        "The model was trained to look at a picture with a tool and to count its squares",
        ("sample_looking --tool --count 8000 --right 0.3",),
        WITH_PICTURES,
        model={},
        maker="tasks.learner.tiny_vision:tiny_qwen3_vl",
    ),
    "alphabet_sort": Recipe(
        "The model was trained to keep a list of names sorted over several turns",
        ("sample_alphabet_sort --count 4800 --min-words 1 --max-words 2 --num-names 26",),
        (NO_THOUGHTS, *SHORT),
    ),
    "kuhn_poker": Recipe(
        "The model played both seats of a small poker game, whose chips add up to zero",
        ("sample_kuhn_poker --count 4800",),
        (NO_THOUGHTS, *SHORT),
        try_next="algorithm.decay=0.95",
    ),
    "proposer_solver": Recipe(
        "The model was trained to set sums and to solve them",
        ("sample_proposer_solver --count 96000 --right 0.4",),
        (
            *(NO_THOUGHTS, *QUICK, "assignment.groups_per_step=96000"),
            *("packing.updates_per_step=1500", "training.decay_steps=1500"),
        ),
        try_next="training.learning_rate=1e-4",
    ),
    "debate": Recipe(
        "Two debaters were trained to convince a judge; what one wins the other loses",
        ("sample_debate --count 32000 --cite 0.15 --misquote 0.15 --num-rounds 1 --at-once 1",),
        (NO_THOUGHTS, *QUICK),
        try_next="algorithm.decay=0.8",
    ),
}
"""By the name of the preset."""


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
    """Return where the sources of a store's demo lie: in the store where that is local.

    Raises StoreError where a link there leads out of the store.
    """
    place = (Path(".stagecoach") if "://" in root else Path(root).expanduser()).resolve()
    for name in ("", "/demonstrations.jsonl", "/words.json"):
        check_links(place, f"sources{name}")
    top = place / "sources"
    return top if preset == FIRST else top / preset


def build(sources: Sources, recipe: Recipe = RECIPES[FIRST]) -> None:
    """Make the model and the demonstrations, unless they are there; each is complete or absent.

    Raises SourceFailed.
    """
    sources.model.parent.mkdir(parents=True, exist_ok=True)
    if not (sources.model.is_dir() and sources.demonstrations.is_file()):
        _demonstrate(sources, recipe)
    if not sources.model.is_dir():
        draft = _draft(sources.model)
        words = json.loads(sources.words.read_text(encoding="utf-8"))
        # In this process, which renders the demonstrations by the same libraries: they take seconds to import.
        try:
            load_function(recipe.maker)(draft, **recipe.model, words=list(dict.fromkeys(words)))
        except Exception as error:
            raise _failure(recipe.maker, f"{type(error).__name__}: {error}") from error
        # At once, so that a model that is there is complete.
        draft.rename(sources.model)


def _demonstrate(sources: Sources, recipe: Recipe) -> None:
    """Write the demonstrations of all environments into one file, and their words into another."""
    rows, words = _draft(sources.demonstrations), []
    for package, *arguments in map(str.split, recipe.demonstrations):
        part, word_file = _draft(rows.with_name(f"{package}.jsonl")), _draft(rows.with_name(f"{package}.json"))
        _run(f"{package}.demonstrations", str(part), "--words", str(word_file), *arguments)
        with rows.open("ab") as file:
            file.write(part.read_bytes())
        words += json.loads(word_file.read_text(encoding="utf-8"))
        part.unlink()
        word_file.unlink()
    sources.words.write_text(json.dumps(words), encoding="utf-8")
    # Renamed last, words first: whoever finds the demonstrations finds all that goes with them.
    rows.rename(sources.demonstrations)


def _draft(path: Path) -> Path:
    draft = path.with_name(f"{path.name}.tmp")
    # Left by a call that was killed; it may be a file or a directory.
    shutil.rmtree(draft, ignore_errors=True)
    draft.unlink(missing_ok=True)
    return draft


def _run(module: str, *arguments: str) -> None:
    """Run a module in a process of its own: the flow's process loads no environment."""
    argv = module_command(module, *arguments)
    done = subprocess.run(argv, env=inherited_variables(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise _failure(module, done.stderr.strip()[-2000:])


def _failure(what: str, why: str) -> SourceFailed:
    return SourceFailed(f"{what} failed: {why}\nNothing was stored. `stagecoach doctor` says what this machine lacks")


def warm_weights(root: str, key: str) -> Path:
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


def weights_of(root: str, sft: Callable[..., Any]) -> str:
    """Return the directory of the weights of the demo's model, which is made in the store where need be.

    It is a small model, warmed up on demonstrations by the flow `sft`: the first call in a store takes the minutes of
    the warm-up, in a run of its own that `stagecoach demo` has too.
    """
    opened = open_store(root)  # before anything else lies there: a store is made in an empty directory
    if not (key := _last_policy(opened)):
        build(sources := Sources(sources_directory(root)))
        paths = {"model": str(sources.model), "data": str(sources.demonstrations)}
        overrides = RECIPES[FIRST].warm_up
        sft(name=WARM_UP, presets=["sft_demo"], **paths, seed=SEED, overrides=overrides, advanced={"store": root})
        key = _last_policy(opened)
    return str(warm_weights(root, key))


def demo_weights(config: RunConfig, sft: Callable[..., Any]) -> str:
    """Return the directory of the weights of the demo's model where `model.path` is `demo`; else nothing.

    The model is made where need be, see `weights_of`. Raises what a config is refused for that names an environment or
    a function that is not here: the warm-up takes minutes.
    """
    if config.model.path != DEMO or config.evaluation.policy or config.external:
        return ""
    config_versions(config.model_copy(update={"model": config.model.model_copy(update={"path": ""})}))
    return weights_of(config.store, sft)


def _last_policy(store: Store) -> str:
    """Return the key of the warm-up's last policy; empty where it is not finished."""
    trained = {entry.step: entry.key for entry in store.ledger.entries(run=WARM_UP, stage="training")}
    # Only the last step's policy: a warm-up that was interrupted goes on where it stopped.
    return trained.get(load(["sft_demo"], RECIPES[FIRST].warm_up).steps - 1, "")

"""Recipe: how the small model of a demo is made and warmed up, as the table `demo` of its preset says.

Called by the command `demo`, and by runs and flows whose `model.path` is `demo`. An environment's package makes its
demonstrations: `python -m PACKAGE.demonstrations FILE --words FILE`, with the texts that the tokenizer keeps whole.
"""

import json
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from configs.layers import PRESETS, presets
from configs.load import load
from configs.run import RunConfig
from flows.runtime.machine_facts import config_versions
from storage.roots import check_links
from storage.store import open_store
from tasks.runtime.imports import load_function
from tasks.runtime.process_variables import inherited_variables, module_command

DEMO = "demo"
"""The value of `model.path` that stands for the demo's weights."""
WARM_UP = "demo-warm-up"
"""The run that warms up the model for `model.path = "demo"`."""
FIRST = "demo"
"""The preset whose sources lie at the top; the sources of other presets lie below, by the preset's name."""
SEED = 17
WarmUp = Callable[..., Mapping[str, Any]]
"""Runs a supervised run; has the parameters of the flow `sft` and returns its outcome."""


@dataclass(frozen=True)
class Recipe:
    """The table `demo` of a preset."""

    about: str
    """The beginning of the first sentence of the demo's summary."""
    demonstrations: Sequence[str]
    """For each environment its package and, after spaces, arguments for the package's `demonstrations`."""
    maker: str
    """Import path of the function that makes the model in a directory."""
    warm_up: Sequence[str] = ()
    """Overrides of the warm-up, which is the preset `sft_demo`."""
    model: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the model; empty where the maker has one size."""
    try_next: str = ""
    """Setting that the summary suggests for a replay."""


def demo_presets() -> list[str]:
    """Return the names of the presets that have a demo, `demo` first."""
    return sorted(filter(_table, presets()), key=lambda preset: (preset != FIRST, preset))


def demo_recipe(preset: str = FIRST) -> Recipe:
    """Return the recipe of a preset that has a demo."""
    return Recipe(**_table(preset))


def _table(preset: str) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((PRESETS / f"{preset}.toml").read_text("utf-8")).get("demo", {})
    return table


class SourceFailed(ValueError):
    """The model or the demonstrations of a demo could not be made."""


ADVICE = "Nothing was stored. `stagecoach doctor` says what this machine lacks"


class Sources:
    """The directory with a demo's random model and its demonstrations."""

    def __init__(self, directory: Path) -> None:
        self.model = directory / "model"
        self.demonstrations = directory / "demonstrations.jsonl"
        self.words = directory / "words.json"


def sources_directory(root: str, preset: str = FIRST) -> Path:
    """Return the directory of a demo's sources: in the store where that is local.

    Raises StoreError where a link there leads out of the store.
    """
    directory = (Path(".stagecoach") if "://" in root else Path(root).expanduser()).resolve()
    for name in ("", "/demonstrations.jsonl", "/words.json"):
        check_links(directory, f"sources{name}")
    return directory / "sources" if preset == FIRST else directory / "sources" / preset


def build(sources: Sources, recipe: Recipe) -> None:
    """Make the model and the demonstrations, unless they exist; each is complete or absent. Raises SourceFailed."""
    sources.model.parent.mkdir(parents=True, exist_ok=True)
    if sources.model.is_dir() and sources.demonstrations.is_file():
        return
    _demonstrate(sources, recipe)
    if not sources.model.is_dir():
        draft = _draft(sources.model)
        words = json.loads(sources.words.read_text(encoding="utf-8"))
        try:
            load_function(recipe.maker)(draft, **recipe.model, words=list(dict.fromkeys(words)))
        except Exception as error:
            raise SourceFailed(f"{recipe.maker} failed: {type(error).__name__}: {error}\n{ADVICE}") from error
        draft.rename(sources.model)  # atomic: a model that exists is complete


def _demonstrate(sources: Sources, recipe: Recipe) -> None:
    """Write the demonstrations of all environments into one file, and their words into another."""
    rows, words = _draft(sources.demonstrations), []
    for module, *arguments in map(str.split, recipe.demonstrations):
        with TemporaryDirectory() as place, rows.open("ab") as file:
            part, word_file = Path(place, "rows.jsonl"), Path(place, "words.json")
            # In a process of its own: the flow's process loads no environment.
            argv = module_command(f"{module}.demonstrations", str(part), "--words", str(word_file), *arguments)
            done = subprocess.run(argv, env=inherited_variables(), capture_output=True, text=True, check=False)
            if done.returncode:
                raise SourceFailed(f"{module}.demonstrations failed: {done.stderr.strip()[-2000:]}\n{ADVICE}")
            file.write(part.read_bytes())
            words += json.loads(word_file.read_text(encoding="utf-8"))
    sources.words.write_text(json.dumps(words), encoding="utf-8")
    rows.rename(sources.demonstrations)  # last: where it exists, the words do


def _draft(path: Path) -> Path:
    draft = path.with_name(f"{path.name}.tmp")
    # A killed call left it: a file or a directory.
    shutil.rmtree(draft, ignore_errors=True)
    draft.unlink(missing_ok=True)
    return draft


def warmed_weights(root: str, sft: WarmUp, preset: str = FIRST, run: str = WARM_UP) -> str:
    """Return the directory of a preset's model, warmed up by the run `run` of `sft`; what exists is not made again."""
    store = open_store(root)  # before anything else lies there: a store is made in an empty directory
    recipe, sources = demo_recipe(preset), Sources(sources_directory(root, preset))
    build(sources, recipe)
    paths = {"model": str(sources.model), "data": str(sources.demonstrations)}
    outcome = sft(
        name=run, presets=["sft_demo"], **paths, seed=SEED, overrides=recipe.warm_up, advanced={"store": root}
    )
    return str(store.policies.directory(outcome["policy"]["key"]))


def demo_weights(config: RunConfig, sft: WarmUp) -> str:
    """Return the directory of the demo's weights where `model.path` is `demo`; else nothing. Makes missing weights.

    Raises what a config is refused for that names a missing environment or function: the warm-up takes minutes.
    """
    if config.model.path != DEMO or config.evaluation.policy or config.external:
        return ""
    config_versions(config.model_copy(update={"model": config.model.model_copy(update={"path": ""})}))
    # The last policy of a warm-up that is finished, also by other versions of its packages; of several the newest.
    last = load(["sft_demo"], demo_recipe().warm_up).steps - 1
    store = open_store(config.store)
    for entry in reversed(store.ledger.entries(run=WARM_UP, stage="training")):
        if entry.step == last:
            return str(store.policies.directory(entry.key))
    return warmed_weights(config.store, sft)

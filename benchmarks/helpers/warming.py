"""The small model that a benchmark trains, warmed up on demonstrations of its environment."""

from flows.cli import launch
from flows.runtime.demo_sources import FIRST, RECIPES, Recipe, Sources, build, sources_directory
from flows.runtime.prepare import prepare
from storage.store import open_store

SEED = 17


def warmed_up(store: str, preset: str = FIRST, recipe: Recipe | None = None) -> str:
    """Make and warm up the model of a preset, or of another recipe, in a store; return the directory of its weights."""
    recipe = recipe or RECIPES[preset]
    opened = open_store(store)  # before the sources lie there: a store is made in an empty directory
    build(sources := Sources(sources_directory(store, preset)), recipe)
    overrides = [*recipe.warm_up, *sources.overrides]
    config = prepare("sft", ["sft_demo"], overrides, name="warm-up", store=store, seed=SEED)
    return str(opened.policies.directory(launch.run(config)["policy"]["key"]))

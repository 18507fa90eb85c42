"""The demo's presets: each can be built, and what is built is what its preset and its environments say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from configs.layers import presets
from configs.load import load
from flows import cli
from flows.cli import demo
from flows.runtime import demo_sources
from flows.runtime.demo_sources import (
    Recipe,
    SourceFailed,
    Sources,
    build,
    demo_presets,
    demo_recipe,
)

ROOT = Path(__file__).parents[3]
# Stands in for an environment's package: rows say how it was asked, so that files tell what was run.
PACKAGE = """
import json, pathlib, sys
path, flag, words, *rest = sys.argv[1:]
assert flag == "--words"
if rest == ["--fail"]:
    sys.exit("the disk is full")
pathlib.Path(path).write_text(json.dumps({{"messages": [], "asked": rest}}) + "\\n")
pathlib.Path(words).write_text(json.dumps(["{word}", "both"]))
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two packages with demonstrations, for the processes that are started, and a model that is but its words."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "demonstrations.py").write_text(PACKAGE.format(word=name))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "sources"


def make(directory, *, words, **sizes):
    """Make a model that is but its sizes and words."""
    directory.mkdir()
    (directory / "made").write_text(json.dumps([sizes, words]))


def refuse(directory, *, words):
    """Fail after a part was written."""
    directory.mkdir()
    raise OSError("the disk is full")


TWO = Recipe("It learnt", ("first --count 3", "second"), f"{__name__}:make", model={"hidden": 8})


@pytest.mark.engine
def test_sources_are_what_the_packages_say_and_are_made_once(packages):
    build(sources := Sources(packages), TWO)
    rows = [json.loads(line)["asked"] for line in sources.demonstrations.read_text().splitlines()]
    assert rows == [["--count", "3"], []]
    made = json.loads((sources.model / "made").read_text())
    assert made == [{"hidden": 8}, ["first", "both", "second"]]
    assert sorted(path.name for path in packages.iterdir()) == ["demonstrations.jsonl", "model", "words.json"]
    sources.demonstrations.write_text("mine")
    (sources.model / "made").write_text("mine")
    build(sources, TWO)
    assert sources.demonstrations.read_text() == (sources.model / "made").read_text() == "mine"


@pytest.mark.engine
def test_a_package_that_fails_leaves_nothing_that_looks_complete(packages):
    sources = Sources(packages)
    with pytest.raises(SourceFailed, match=r"second\.demonstrations failed: the disk is full\nNothing was stored"):
        build(sources, replace(TWO, demonstrations=("first", "second --fail")))
    assert not sources.demonstrations.exists() and not sources.model.exists()
    with pytest.raises(SourceFailed, match=r":refuse failed: OSError: the disk is full\nNothing was stored"):
        build(sources, replace(TWO, model={}, maker=f"{__name__}:refuse"))
    assert not sources.model.exists()
    build(sources, TWO)
    assert (sources.model / "made").is_file()
    assert len(sources.demonstrations.read_text().splitlines()) == 2, "what was left over is not in the new file"


@pytest.mark.parametrize("preset", demo_presets())
def test_a_recipe_fits_its_preset(preset):
    recipe, config = demo_recipe(preset), load([preset])
    assert config.kind == "train" and preset in presets()
    packages = {each.split()[0] for each in recipe.demonstrations}
    assert packages == {environment.taskset["id"] for environment in config.environments}
    assert all(Path(ROOT, "examples", name, name, "demonstrations.py").is_file() for name in packages)
    warm_up = load(["sft_demo"], [*recipe.warm_up, "model.path=m"])
    assert warm_up.model.renderer_settings == config.model.renderer_settings
    assert warm_up.training.decay_steps == warm_up.steps * (warm_up.packing.updates_per_step or 1)
    load([preset], [recipe.try_next])


def test_every_preset_of_ours_with_an_environment_of_ours_can_be_shown():
    ours = {path.parent.name for path in ROOT.glob("examples/*/*/demonstrations.py")}
    assert "sample_lookup" in ours
    trained = {name: config for name in presets() if (config := load([name])).kind == "train"}
    shown = {name for name, config in trained.items() if {each.taskset["id"] for each in config.environments} <= ours}
    assert {name for name in shown if not trained[name].model.path} == set(demo_presets())


def test_presets_without_a_demo_and_several_are_refused(capsys):
    for wrong in (["qwen3_gpu"], ["calc_tools", "debate"]):
        assert cli.main(["demo", *wrong]) == 2
        assert "demo takes one of demo, alphabet_sort, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "says"),
    [("algorithm.type=raee", "did you mean rae"), ("environments.0.taskset.id=no_such_taskset", "no_such_taskset")],
)
def test_what_cannot_train_is_refused_before_the_warm_up(monkeypatch, root, override, says):
    monkeypatch.setattr(demo, "warmed_weights", pytest.fail)
    with pytest.raises(ValueError, match=says) as refused:
        demo.train_demo(["demo"], [override], "", str(root), print)
    assert "nothing was started" in "".join([str(refused.value), *getattr(refused.value, "__notes__", ())]).lower()


@pytest.mark.parametrize(("overrides", "seed"), [([], demo_sources.SEED), (["seed=5"], 5)])
def test_a_seed_that_is_given_is_the_one_of_the_training(overrides, seed, monkeypatch, root):
    monkeypatch.setattr(demo, "warmed_weights", lambda *_: "weights")
    monkeypatch.setattr(demo, "resolve_run", lambda *_, **settings: settings)
    config, _ = demo.train_demo(["demo"], overrides, "", str(root), lambda config: {})
    assert config["seed"] == seed

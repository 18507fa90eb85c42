"""A run's rollouts credited by several algorithms: figures, samples side by side, the page; curves of several runs."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from configs.algorithms import RlooConfig
from configs.errors import ConfigError
from configs.load import load
from configs.toml_text import toml
from flows.cli.algorithms import algorithms, page
from flows.cli.comparisons import curves
from flows.cli.credits import VARIANTS, credit_request, figures
from flows.queries.store_reader import recorded_run
from flows.replays.config import prepare_replay
from flows.replays.scratch import credit_in_memory
from flows.reporting.curve import Point, curves_svg
from storage.read.frames import Frames
from storage.store import open_store
from tests.fixtures.commands import file_bytes
from tests.fixtures.rehearsal import SMALL, rehearse
from tests.fixtures.replays import ask, walk


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run of two steps."""
    place = tmp_path_factory.mktemp("credited") / "store"
    rehearse(place, "base", steps=2)
    return place


@pytest.fixture(scope="module")
def held(root: Path) -> dict[str, pl.DataFrame]:
    """The run's rollouts credited by three algorithms, in memory."""
    store = open_store(root)
    recorded = recorded_run(store, "base")[1]
    asked = {name: credit_request(recorded, name, store=str(root)) for name in ("grpo", "rloo", "supervised")}
    return {name: credit_in_memory(store, prepare_replay(request)) for name, request in asked.items()}


def test_every_variant_is_a_config() -> None:
    for name, settings in VARIANTS.items():
        given = {**settings, "teacher": {"path": "/weights"}} if name == "opd" else settings
        assert tomllib.loads(f"algorithm = {toml(given)}")["algorithm"] == given
        assert load(["demo"], [f"algorithm={toml(given)}"]).algorithm.type == settings["type"]
    assert load(["demo"], [f"algorithm={toml(VARIANTS['rloo'])}"]).algorithm == RlooConfig()


def test_a_variant_credits_every_environment_and_keeps_no_setting_of_the_run(tmp_path: Path) -> None:
    shaped = {"type": "grpo", "normalise_std": True, "length_penalty": {}, "epsilon": 0.5}
    own = [SMALL["environments"][0] | {"algorithm": shaped}]
    store = rehearse(tmp_path / "store", "base", steps=1, algorithm=shaped, environments=own)
    recorded = recorded_run(store, "base")[1]
    for name in ("grpo", "rloo", "supervised"):
        config = prepare_replay(credit_request(recorded, name, store=str(tmp_path / "store")))
        assert config.algorithms == {} and config.algorithm.type == name
        assert config.algorithm == load(["demo"], [f"algorithm={toml(VARIANTS[name])}"]).algorithm


@pytest.mark.parametrize(
    "algorithm",
    [{"type": "rloo"}, {"type": "custom", "function": "tests.fixtures.masks:remembering", "keeps_state": True}],
)
def test_credits_in_memory_are_those_of_a_replay(algorithm: dict[str, Any], root: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(root, tmp_path / "store"))
    config = ask(place, from_stage="advantage", until="advantage", overrides=[f"algorithm={toml(algorithm)}"])
    in_memory = credit_in_memory(open_store(place), config)
    walk(config)
    kept = Frames(open_store(place)).run(config.name)["samples"].select(in_memory.columns).collect()
    assert_frame_equal(kept, in_memory, check_row_order=False, check_dtypes=False)
    assert kept["step"].n_unique() == 2
    in_store = Frames(open_store(place)).run(config.name)["samples"].collect()
    memory, store = figures({"memory": in_memory, "store": in_store})
    assert store == pytest.approx(memory | {"name": "store"}, abs=1e-6)


def test_the_command_leaves_the_store_as_it_was(root: Path, capsys: Any) -> None:
    before = file_bytes(root)
    assert algorithms("base", "grpo", "rloo", "rae", store=str(root), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["algorithms"]] == ["grpo", "rloo"]
    assert [each["name"] for each in found["refused"]] == ["rae"]
    assert file_bytes(root) == before


def test_figures_are_those_of_the_credits(held: dict[str, pl.DataFrame]) -> None:
    grpo, rloo, supervised = figures(held)
    rows = held["grpo"]
    assert [each["name"] for each in (grpo, rloo, supervised)] == ["grpo", "rloo", "supervised"]
    assert grpo["num_samples"] == rows.height
    assert grpo["rl_tokens"] == sum(weight != 0 for row in rows["rl_weights"] for weight in row) > 0
    assert grpo["ce_tokens"] == supervised["rl_tokens"] == 0
    assert supervised["ce_tokens"] >= grpo["rl_tokens"]
    assert (supervised["advantage_std"], supervised["signal"], supervised["agreement"]) == (None, None, None)
    assert grpo["advantage_mean"] == pytest.approx(rows["advantage"].mean(), abs=1e-12)
    carried = sum(value for row in rows["advantages"] for value in row if value is not None)
    assert grpo["signal"] == pytest.approx(carried / grpo["rl_tokens"], rel=1e-5)
    assert [grpo["agreement"], rloo["agreement"]] == [pytest.approx(1.0)] * 2
    size = SMALL["assignment"]["group_size"]
    assert (
        rloo["advantage_max"] == pytest.approx(grpo["advantage_max"] * size / (size - 1)) and rloo["advantage_max"] > 0
    )
    assert figures({}) == []
    none = figures({"rloo": held["rloo"], "grpo": held["grpo"].clear()})[1]
    assert (none["name"], none["num_samples"], none["rl_tokens"], none["signal"]) == ("grpo", 0, 0, None)


def test_the_page_has_every_algorithm_and_what_was_refused(held: dict[str, pl.DataFrame]) -> None:
    refused = {"name": "rae", "refusal": "table traces, column agent: one seat."}
    text = page({"run": "base", "algorithms": figures(held), "refused": [refused]}, {"steps": "3:10", "teacher": ""})
    assert "| grpo | " in text and "| rloo | " in text and "| supervised | " in text
    assert "stagecoach algorithms base grpo rloo supervised rae --steps 3:10\n" in text
    assert "- `rae`: table traces, column agent: one seat." in text


def test_an_unknown_algorithm_is_refused_before_anything_is_done(root: Path) -> None:
    runs = open_store(root).runs.names()
    with pytest.raises(ConfigError, match="grop: the known ones are grpo"):
        algorithms("base", "grpo", "grop", store=str(root))
    assert open_store(root).runs.names() == runs


def test_curves_of_several_runs(tmp_path: Path, capsys: Any) -> None:
    root = tmp_path / "store"
    for name, algorithm in (("base", "grpo"), ("by-grpo", "rloo")):
        rehearse(root, name, steps=2, algorithm={"type": algorithm})
    assert curves("base", "by-grpo", store=str(root), output=str(tmp_path / "page.md")) == 0
    text, picture = ((tmp_path / name).read_text() for name in ("page.md", "page.svg"))
    assert "| step | base | by-grpo |" in text and "![curves](page.svg)" in text and picture.count("L") >= 2
    capsys.readouterr()
    assert curves("base", store=str(root)) == 0
    assert "base" in capsys.readouterr().out


def test_a_series_without_points_is_left_out() -> None:
    drawn = curves_svg({"a": [Point(0, 0.5), Point(1, 0.75)], "b": [Point(0, float("nan"))]}, "t")
    assert drawn.count('class="line"') == 2 and "a 0.750" in drawn
    assert "no scored step yet" in curves_svg({}, "t")

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
from flows.cli.algorithms import (
    VARIANTS,
    Credited,
    algorithms,
    credit_request,
    describe_credits,
    figures,
    page,
    side_by_side,
)
from flows.cli.comparisons import curves
from flows.queries.store_reader import recorded_run
from flows.replays.config import prepare_replay
from flows.replays.scratch import credit_in_memory
from flows.reporting.curve import Point, curves_svg
from storage.read.frames import Frames
from storage.store import open_store
from tests.fixtures.rehearsal import SMALL, rehearse
from tests.fixtures.replays import ask, walk

REFUSED = Credited("rae", None, "table traces, column agent: one seat.\nNothing was trained.")


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


def test_the_command_leaves_the_store_as_it_was(root: Path, capsys: Any) -> None:
    def files() -> dict[str, bytes]:
        return {str(each.relative_to(root)): each.read_bytes() for each in root.rglob("*") if each.is_file()}

    before = files()
    assert algorithms("base", "grpo", "rloo", "rae", store=str(root), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["algorithms"]] == ["grpo", "rloo"]
    assert [each["name"] for each in found["refused"]] == ["rae"]
    assert files() == before


def test_advantages_stand_beside_each_other_by_sample(held: dict[str, pl.DataFrame]) -> None:
    laid = side_by_side(held)
    assert laid.columns == ["sample_id", "grpo", "rloo", "supervised"] and laid.height
    groups = held["grpo"].select("sample_id", "group_id")
    sizes = groups.group_by("group_id").len()
    for sample, grpo, rloo, none in laid.iter_rows():
        (group_id,) = groups.filter(sample_id=sample)["group_id"]
        (size,) = sizes.filter(group_id=group_id)["len"]
        assert rloo == pytest.approx(grpo * size / (size - 1)) and none is None
    assert laid["grpo"].abs().max() > 0


def test_figures_are_those_of_the_credits(held: dict[str, pl.DataFrame]) -> None:
    found = {name: figures(made) for name, made in held.items()}
    rows = held["grpo"]
    assert found["grpo"]["num_samples"] == rows.height
    assert found["grpo"]["rl_tokens"] == sum(weight != 0 for row in rows["rl_weights"] for weight in row) > 0
    assert found["grpo"]["ce_tokens"] == found["supervised"]["rl_tokens"] == 0
    assert found["supervised"]["ce_tokens"] >= found["grpo"]["rl_tokens"]
    assert found["supervised"]["advantage_std"] is None
    assert found["grpo"]["advantage_mean"] == pytest.approx(rows["advantage"].mean(), abs=1e-12)


def test_the_page_has_every_algorithm_one_group_and_what_was_refused(root: Path, held: dict[str, pl.DataFrame]) -> None:
    credited = [*(Credited(name, made) for name, made in held.items()), REFUSED]
    found = describe_credits(Frames(open_store(root)), "base", credited)
    assert [row["agreement"] for row in found["algorithms"]] == [pytest.approx(1.0), pytest.approx(1.0), None]
    rewards = [row["reward"] for row in found["group"]["rows"]]
    assert rewards == sorted(rewards, reverse=True) and rewards[0] > rewards[-1]
    text = page(found)
    assert "| grpo | " in text and "| rloo | " in text and "| supervised | " in text
    assert "| reward | tokens | grpo | rloo |" in text
    assert "- `rae`: table traces, column agent: one seat. Nothing was trained." in text


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

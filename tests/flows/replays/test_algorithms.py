"""A run's rollouts credited by several algorithms: figures, samples side by side, the page; curves of several runs."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from configs.algorithms import RlooConfig
from configs.errors import ConfigError
from configs.load import load
from flows.cli.algorithms import (
    VARIANTS,
    Credited,
    algorithms,
    credit_request,
    describe_credits,
    figures,
    page,
    samples,
    toml,
)
from flows.cli.comparisons import curves
from flows.queries.store_reader import recorded_run
from flows.replays.config import prepare_replay
from flows.reporting.curve import Point, curves_svg
from storage.read.frames import Frames
from storage.store import open_store
from tests.fixtures.rehearsal import SMALL, rehearse
from tests.fixtures.replays import ask, walk

REFUSED = Credited("rae", "", "table traces, column agent: one seat.\nNothing was trained.")


@pytest.fixture(scope="module")
def credited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Credited]]:
    root = tmp_path_factory.mktemp("credited") / "store"
    rehearse(root, "base", steps=2)
    held = []
    for name in ("grpo", "rloo", "supervised"):
        config = ask(root, from_stage="advantage", until="advantage", overrides=[f"algorithm={toml(VARIANTS[name])}"],
                     name=f"by-{name}")  # fmt: skip
        walk(config)
        held.append(Credited(name, f"by-{name}"))
    return root, held


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


def test_advantages_stand_beside_each_other_by_sample(credited: tuple[Path, list[Credited]]) -> None:
    root, held = credited
    frames = Frames(open_store(root))
    laid = samples(frames, held)
    assert laid.columns == ["sample_id", "grpo", "rloo", "supervised"] and laid.height
    groups = frames.run("by-grpo")["samples"].select("sample_id", "group_id").collect()
    sizes = groups.group_by("group_id").len()
    for sample, grpo, rloo, none in laid.iter_rows():
        (group_id,) = groups.filter(sample_id=sample)["group_id"]
        (size,) = sizes.filter(group_id=group_id)["len"]
        assert rloo == pytest.approx(grpo * size / (size - 1)) and none is None
    assert laid["grpo"].abs().max() > 0


def test_figures_are_those_of_the_credits(credited: tuple[Path, list[Credited]]) -> None:
    root, held = credited
    frames = Frames(open_store(root))
    found = {each.name: figures(frames, each) for each in held}
    rows = frames.run("by-grpo")["samples"].collect()
    assert found["grpo"]["num_samples"] == rows.height
    assert found["grpo"]["rl_tokens"] == sum(weight != 0 for row in rows["rl_weights"] for weight in row) > 0
    assert found["grpo"]["ce_tokens"] == found["supervised"]["rl_tokens"] == 0
    assert found["supervised"]["ce_tokens"] >= found["grpo"]["rl_tokens"]
    assert found["supervised"]["advantage_std"] is None
    assert found["grpo"]["advantage_mean"] == pytest.approx(rows["advantage"].mean(), abs=1e-12)


def test_the_page_has_every_algorithm_one_group_and_what_was_refused(credited: tuple[Path, list[Credited]]) -> None:
    root, held = credited
    found = describe_credits(Frames(open_store(root)), "base", [*held, REFUSED])
    assert [row["agreement"] for row in found["algorithms"]] == [pytest.approx(1.0), pytest.approx(1.0), None]
    rewards = [row["reward"] for row in found["group"]["rows"]]
    assert rewards == sorted(rewards, reverse=True) and rewards[0] > rewards[-1]
    text = page(found)
    assert "| grpo | " in text and "| rloo | " in text and "| supervised | " in text
    assert "| reward | tokens | grpo | rloo |" in text
    assert "- `rae`: table traces, column agent: one seat. Nothing was trained." in text


def test_an_unknown_algorithm_is_refused_before_anything_is_done(credited: tuple[Path, list[Credited]]) -> None:
    root, _ = credited
    runs = open_store(root).runs.names()
    with pytest.raises(ConfigError, match="grop: the known ones are grpo"):
        algorithms("base", ["grpo", "grop"], store=str(root))
    assert open_store(root).runs.names() == runs


def test_curves_of_several_runs(credited: tuple[Path, list[Credited]], tmp_path: Path, capsys: Any) -> None:
    root, _ = credited
    assert curves(["base", "by-grpo"], store=str(root), output=str(tmp_path / "page.md")) == 0
    text, picture = ((tmp_path / name).read_text() for name in ("page.md", "page.svg"))
    assert "| step | base | by-grpo |" in text and "![curves](page.svg)" in text and picture.count("L") >= 2
    capsys.readouterr()
    assert curves(["base"], store=str(root)) == 0
    assert "base" in capsys.readouterr().out


def test_a_series_without_points_is_left_out() -> None:
    drawn = curves_svg({"a": [Point(0, 0.5), Point(1, 0.75)], "b": [Point(0, float("nan"))]}, "t")
    assert drawn.count('class="line"') == 2 and "a 0.750" in drawn
    assert "no scored step yet" in curves_svg({}, "t")

"""Rewards of several runs, side by side, and as a page with a picture."""

from pathlib import Path
from typing import Any

from flows.cli.comparisons import curves
from flows.reporting.curve import Point, curves_svg
from tests.fixtures.rehearsal import rehearse


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

"""The door for notebooks: the frames of the pages, as docs/viewing.md has them, from a store that stays as it was."""

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import polars as pl
import pytest

from flows.queries.request import NotThere
from flows.viewer.notebook import Viewer
from flows.viewer.rendering import templates
from storage.errors import LayoutError
from storage.read.frames import Frames

PAGE = (Path(__file__).parents[3] / "docs/viewing.md").read_text()


@pytest.fixture(scope="module")
def root(forked):
    """A run of two steps, and a replay that credits its rollouts by another algorithm."""
    return Path(forked.store.root.address)


@pytest.fixture(scope="module")
def viewer(root):
    return Viewer(root)


def test_what_the_page_on_viewing_writes_works(root, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "stagecoach-store" in example and len(example.splitlines()) > 8
    monkeypatch.chdir(root.parent)
    exec(compile(example.replace("stagecoach-store", "store").replace("demo", "base"), "viewing.md", "exec"), {})


def test_frames_are_those_of_the_tables(viewer):
    assert viewer.runs()["run"].to_list() == ["base", "fork"] and len(viewer.steps("base")) == 2
    assert viewer.rollouts("base")["step"].unique().to_list() == [1], "the last step"
    assert viewer.rollouts("base", 0)["step"].unique().to_list() == [0]
    stored = Frames(viewer.reader.store).run("base")["samples"].filter(step=1).collect()
    assert (
        {*viewer.batch("base", 1).samples.select("sample_id", "advantage").rows()}
        == {*stored.select("sample_id", "advantage").rows()}
        != set()
    )
    assert len(viewer.frame("traces", "base")) == 24 == len(viewer.frame("rollouts", "base"))
    assert viewer.steps()["run"].to_list() == ["fork", "fork"], "the newest run"
    with pytest.raises(NotThere, match="no run 'nobody'"):
        viewer.steps("nobody")


def test_a_trace_comes_with_its_messages_tokens_and_outcome(viewer):
    sample = viewer.batch("base", 0).samples.row(0, named=True)
    trace = viewer.trace(sample["trace_id"], run="base")
    assert (trace.run, trace.row["reward"], trace.outcome["outcome"]) == ("base", sample["reward"], "trained")
    weighted = trace.tokens.filter(pl.col("rl_weight") != 0)
    assert len(weighted) == trace.messages["num_sampled"].sum() > 0 and "text" in trace.tokens.columns
    assert weighted["advantage"].to_list() == pytest.approx([sample["advantage"]] * len(weighted))
    assert f"rollout {sample['trace_id']} of run base" in repr(trace) and "[assistant]" in repr(trace)
    with pytest.raises(NotThere, match="names no trace"):
        viewer.trace("nothing-like-it")


def test_frames_have_few_columns_unless_all_are_asked_for(viewer):
    for read, name in ((viewer.runs, "state"), (viewer.steps, "reward/all/mean"), (viewer.rollouts, "reply")):
        few, every = read(), read(all_columns=True)
        assert name in few.columns and len(few.columns) <= 20 < len(every.columns)
        assert {*few.columns} < {*every.columns} and few.height == every.height


def test_curves_are_one_picture_without_a_style_sheet(viewer):
    both = viewer.plot("base", "fork")._repr_svg_()
    picture = ElementTree.fromstring(both)
    texts = [text.text for text in picture.findall(".//{*}text")]
    assert {"Reward", "base mean", "fork mean"} <= {*texts} and "class=" not in both
    assert "Held-out average" not in texts, "they were not evaluated"
    bands = [polygon.get("points").split() for polygon in picture.findall(".//{*}polygon")]
    lines = [path.get("d") for path in picture.findall(".//{*}path") if path.get("opacity") is None]
    assert [len(band) for band in bands] == [4, 4], "two steps, there and back"
    assert [len(re.findall(r"[ML][\d.]+ [\d.]+", line)) for line in lines] == [2, 2]
    assert "nan" not in both
    assert "highest" in viewer.plot(figures=["Highest and lowest reward"]).svg
    lines = [{"name": f"run-{number}", "steps": [0], "values": [1.0]} for number in range(7)]
    drawn = templates().get_template("plot.html").render(plots={"KL": lines})
    places = re.findall(r'<text[^>]*x="(\d+)" y="(\d+)">run-', drawn)
    assert len({*places}) == 7 and 'viewBox="0 0 640 268"' in drawn, "three rows of names below the chart"
    line = {"name": "kl", "steps": [0, 1, 2, 3], "values": [math.nan, math.inf, 0.4, 0.5]}
    drawn = templates().get_template("plot.html").render(plots={"KL": [line]})
    assert re.findall(r"[ML][\d.]+ [\d.]+", drawn) == ["M60 30", "M440.0 190.0", "L630.0 30.0"], "the axes, and two"
    with pytest.raises(NotThere, match=r"no figure 'Rewards' was measured; did you mean Reward\?"):
        viewer.plot(figures=["Rewards"])


def test_what_is_no_store_is_refused_and_none_is_made(tmp_path):
    with pytest.raises(LayoutError):
        Viewer(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()

"""The door for notebooks: the frames of the pages, as docs/viewing.md has them, from a store that stays as it was."""

import re
import shlex
from pathlib import Path

import polars as pl
import pytest

from flows.cli import parse
from flows.queries.request import NotThere
from flows.viewer.notebook import Viewer, open_viewer
from storage.errors import LayoutError
from storage.read.frames import Frames
from tests.fixtures import replays
from tests.fixtures.rehearsal import rehearse

PAGE = (Path(__file__).parents[3] / "docs/viewing.md").read_text()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, and a replay that credits its rollouts by another algorithm."""
    root = tmp_path_factory.mktemp("notebook") / "store"
    rehearse(root, "demo")
    replays.walk(replays.ask(root, run="demo", name="other", overrides=[replays.RLOO]))
    return root


@pytest.fixture(scope="module")
def viewer(root: Path) -> Viewer:
    return open_viewer(root)


def test_what_the_page_on_viewing_writes_works(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "stagecoach-store" in example and len(example.splitlines()) > 8
    monkeypatch.chdir(root.parent)
    exec(compile(example.replace("stagecoach-store", "store"), "viewing.md", "exec"), {})


def test_every_command_of_the_page_is_one() -> None:
    commands = [shlex.split(line) for line in re.findall(r"^\$ (?:ssh .* )?stagecoach (.*)$", PAGE, re.MULTILINE)]
    assert len(commands) >= 9, "or the page writes its commands in another form"
    for command in commands:
        assert parse(command)


def test_frames_are_those_of_the_tables(root: Path, viewer: Viewer) -> None:
    stored = Frames(viewer.reader.store).run("demo")
    at_step = pl.col("step") == 1
    traces = stored.traces.filter(at_step).collect()
    assert viewer.runs()["run"].to_list() == ["demo", "other"]
    assert sorted(viewer.traces("demo", 1)["trace_id"]) == sorted(traces["trace_id"]) and len(traces) == 12
    assert viewer.groups("demo", 1)["num_traces"].to_list() == [4, 4, 4]
    assert len(viewer.steps("demo")) == 2 and set(viewer.series("demo")["step"]) == {0, 1}
    samples = viewer.batch("demo", 1).samples
    credits = stored.samples.filter(at_step).select("sample_id", "advantage").collect()
    both = samples.join(credits, on="sample_id", suffix="_stored")
    assert len(both) == len(credits) > 0 and (both["advantage"] == both["advantage_stored"]).all()
    assert set(viewer.slices("demo")["table"]) >= {"traces", "samples", "batches"}
    assert len(viewer.stage_times("demo")) > 10 and viewer.scores("demo").is_empty()
    assert viewer.tables("demo").traces.select(pl.len()).collect().item() == 24


def test_a_trace_comes_with_its_messages_tokens_and_outcome(viewer: Viewer) -> None:
    sample = viewer.batch("demo", 0).samples.row(0, named=True)
    trace = viewer.trace(sample["trace_id"], run="demo")
    assert (trace.fields["run"], trace.fields["reward"], trace.outcome["outcome"]) == (
        "demo",
        sample["reward"],
        "trained",
    )
    assert trace.branches == [[0, 1]] and len(trace.messages) == 2
    weighted = trace.tokens.filter(pl.col("rl_weight") != 0)
    assert len(weighted) == trace.messages["num_sampled"].sum() > 0
    assert weighted["advantage"].to_list() == pytest.approx([sample["advantage"]] * len(weighted))
    assert "text" in trace.tokens.columns
    found = viewer.attempts("demo", sample["environment"], sample["example_id"])
    assert sample["trace_id"] in found["trace_id"].to_list()
    assert len(viewer.batch("demo", 0).tokens(0)) == viewer.batch("demo", 0).rows["num_tokens"][0]


def test_comparisons_are_of_the_two_runs(viewer: Viewer) -> None:
    pair = viewer.compare("demo", "other")
    assert pair.steps["step"].to_list() == [0, 1]
    assert set(pair.traces(0)["side"]) == {"both"}, "a replay has the same rollouts"
    changed = pair.samples(0)
    assert len(changed) == 12 and changed.filter(pl.col("difference") != 0).height > 0
    assert pair.evaluations.is_empty() and len(pair.groups(0)) == 3
    first = viewer.traces("demo", 0).row(0, named=True)
    assert set(pair.attempts(first["environment"], first["example_id"])["side"]) == {"a", "b"}


def test_the_values_of_a_page_are_there_too_and_latest_is_the_newest_run(viewer: Viewer) -> None:
    said = viewer.page("http://127.0.0.1:8265/runs/demo/steps/0/batch?colour=reward&token=x")
    assert (said["run"], said["colour"], said["num_samples"]) == ("demo", "reward", 12)
    assert viewer.steps()["run"].to_list() == ["other", "other"]
    with pytest.raises(NotThere, match="there is no page"):
        viewer.page("/nowhere")
    with pytest.raises(NotThere, match="has a trace 'nothing"):
        viewer.trace("nothing-like-it")


def test_what_is_no_store_is_refused_and_none_is_made(tmp_path: Path) -> None:
    with pytest.raises(LayoutError):
        open_viewer(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()

"""A run that another process started, in the panel."""

import io

import pytest
from rich.console import Console

from flows import cli
from flows.cli.run import panel_for
from flows.queries.store_reader import StoreReader, recorded_run
from flows.queries.watched import Watched
from flows.runtime import loop
from flows.runtime.session import record_run
from flows.runtime.step_report import finish_step
from tests.fixtures import evaluations, rehearsal
from tests.fixtures.terminals import Terminal


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with a finished run of three steps that was evaluated twice."""
    root = tmp_path_factory.mktemp("watched") / "store"
    evaluations.train(root, "a", evaluations.Sampler(), steps=3, evaluation={"every": 2, "num_examples": 6})
    return root


def test_a_finished_run_is_shown_at_once_with_what_came_of_it(store, capsys):
    assert cli.main(["watch", "a", "--plain", "--store", str(store)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train a: 3 steps"
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == ["step 1/3", "step 2/3", "step 3/3"]
    assert sum(line.startswith("evaluation of policy ") for line in lines[:-4]) == 2
    end = lines.index("run a: finished")
    assert lines[end + 1].startswith("3 steps, reward ")
    assert lines[end + 2].startswith("evaluation of policy 0 on ")


def following(root, **settings):
    """Return a panel of the run, its config changed, and what shows the run in it."""
    reader = StoreReader.at(root)
    config = recorded_run(reader.store, "a")[1].model_copy(update=settings)
    return panel_for(config, plain=True), Watched(reader, "a", config)


def test_the_panel_of_a_run_that_goes_on_grows_with_the_store(tmp_path):
    root = tmp_path / "store"
    rehearsal.rehearse(root, "a", steps=2)
    panel, watched = following(root, steps=4)
    watched.show(panel)
    assert "2/4 steps" in _drawn(panel)
    watched.show(panel)
    assert "2/4 steps" in _drawn(panel), "nothing is shown twice"
    rehearsal.rehearse(root, "a", steps=3)
    watched.show(panel)
    assert "3/4 steps" in _drawn(panel)


def test_a_live_run_says_how_many_rollouts_of_a_step_are_there(tmp_path):
    session = rehearsal.session_for(tmp_path / "store", "a", steps=5)
    panel = panel_for(session.config, plain=True)
    session.watchers = (panel,)
    session.context.note_units(2, 2)
    assert "step 3/5  rollout 8/12" in _drawn(panel)


def _drawn(panel):
    console = Console(file=io.StringIO(), width=90, color_system=None)
    console.print(panel)
    return str(console.file.getvalue())


@pytest.mark.engine  # a process on a terminal of its own
def test_on_a_terminal_the_panel_grows_and_the_end_of_the_run_ends_it(tmp_path):
    session = rehearsal.session_for(tmp_path / "store", "a", steps=3)
    with record_run(session):
        steps = loop.train_steps(rehearsal.Rehearsal(session), rehearsal.SOURCE)
        finish_step(session, next(steps))
        with Terminal("watch", "a", "--store", str(tmp_path / "store")) as terminal:
            terminal.wait_for("1/3 steps")
            for finished in steps:
                finish_step(session, finished)
            terminal.wait_for("3/3 steps")
            session.record("finished")
            terminal.wait_for("run a: finished")
            terminal.wait_for("3 steps, reward")

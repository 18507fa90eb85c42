"""The command that sends a recorded run to W&B or TensorBoard."""

from unittest.mock import MagicMock, Mock

import pytest

from flows import cli
from flows.queries.store_reader import StoreReader, recorded_run
from flows.queries.tracked_rows import recorded_rows
from flows.reporting import tracking
from flows.reporting.tracking import TrackingError, finite
from tests.fixtures.rehearsal import rehearse
from tests.fixtures.tracked import events, scalars, texts


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with a run that was never tracked."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    rehearse(tmp_path / "store", "a", steps=2)
    return tmp_path / "store"


def _rows(store):
    library = StoreReader.at(store)
    return [*recorded_rows(library, *recorded_run(library.store, "a"))]


def test_a_recorded_run_becomes_files_of_tensorboard(store, capsys):
    assert cli.main(["track", "a", "--to", "tensorboard", "tracking.samples_every=1", "--store", str(store)]) == 0
    directory = store / "logs/a/tensorboard"
    said = f"2 rows of a. TensorBoard files: {directory}; `tensorboard --logdir {directory}` shows them\n"
    assert capsys.readouterr().out == said
    found = events(directory)
    wanted = {row.step: pytest.approx(finite(row.figures)[0], rel=1e-6) for row in _rows(store)}
    assert scalars(found) == wanted
    assert set(texts(found, "samples")) == {0, 1}


def test_success_is_printed_only_after_the_sink_is_closed(store, monkeypatch, capsys):
    sink = MagicMock(where="nowhere")
    sink.__enter__.return_value, sink.__exit__.side_effect = sink, TrackingError("the last rows were not sent")
    monkeypatch.setattr(tracking, "open_sink", Mock(return_value=sink))
    assert cli.main(["track", "a", "--to", "tensorboard", "--store", str(store)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "the last rows were not sent" in said.err


def test_a_run_that_is_not_there_cannot_be_sent(store, capsys):
    assert cli.main(["track", "nobody", "--to", "tensorboard", "--store", str(store)]) == 2
    assert "no run 'nobody'" in capsys.readouterr().err
    assert not (store / "logs").exists()

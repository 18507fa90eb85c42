"""The numbers of a run by step: the rows of table `metrics`, wherever they are shown, and read once."""

import pytest

from configs.services import TensorboardTracking
from flows.cli.run_report import describe
from flows.queries.metrics import numbers
from flows.queries.store_reader import StoreReader
from flows.reporting.figures import step_figures
from flows.reporting.tracking import TrackingWatcher
from tasks.metrics.figures import metric_values
from tasks.metrics.rollouts import rollout_metrics
from tasks.metrics.stage import metrics_table
from tests.fixtures.builders import table, trace, verdict
from tests.fixtures.rehearsal import rehearse, reported
from tests.fixtures.tracked import Written
from tests.flows.viewer.hand_made import RUN
from tests.flows.viewer.looking import what_is_read
from tests.flows.viewer.stepped import begun


def test_page_show_and_tracking_give_what_the_table_says(tmp_path):
    """Every number of the table, and of the ledger beside it, in all places: one that differs would be seen here."""
    sink = Written()
    reported(tmp_path / "store", "a", TrackingWatcher(sink, TensorboardTracking()))
    library = StoreReader.at(tmp_path / "store")
    shown = describe(library.store, "a", library.config("a"))["steps"]
    for each, told in zip(numbers(library, "a"), shown, strict=True):
        (entry,) = (e for e in library.store.ledger.entries(run="a", stage="metrics") if e.step == each.step)
        table = metric_values(library.store.read(entry.slices("metrics")))
        assert len(table) > 60 and table.items() <= each.values.items()
        ledger = {name.split("/")[0] for _, name in each.values.keys() - table.keys()}
        assert ledger == {"timing", "tokens", "tokens_per_second"}
        live = {"warnings", "figures/identical_replies", "figures/repetition"}  # worked out as a step ends
        sent = sink.rows[each.step].figures
        assert step_figures(each.values) == {name: value for name, value in sent.items() if name not in live}
        assert live < sent.keys()
        assert told["reward"] == table["all", "reward/mean"] == each.value("reward/mean", "all")
        assert told["kept"] == each.value("kept")
        for name in ("loss", "grad_norm", "mismatch_kl"):
            assert each.value(f"updates/{name}/mean") == pytest.approx(told[name], rel=1e-12)


def test_of_an_unfinished_step_only_the_ledger_is_told_and_no_number(tmp_path, hand):
    (each,) = numbers(begun(tmp_path / "begun", 2), RUN)
    assert (each.work.finished, each.values) == (False, {})
    hand.work("rollout", {"traces": [trace("t0")]})
    (each,) = numbers(hand.reader, RUN)
    assert not each.work.finished and {name for _, name in each.values} == {"timing/stage/rollout"}


def test_of_a_step_that_was_drawn_again_the_last_batch_counts(hand):
    for number, reward in enumerate((0.0, 1.0)):
        rollouts, verdicts = [trace(f"t{number}", reward=reward)], [verdict(f"t{number}")]
        values = metrics_table(rollout_metrics(table("traces", rollouts), table("verdicts", []))).to_pylist()
        key = hand.work("rollout", {"traces": rollouts}, minutes=number)
        judged = hand.work("filtering", {"verdicts": verdicts}, minutes=number, rollout=key)
        hand.work("metrics", {"metrics": values}, minutes=number, rollout=key, filtering=judged)
    (each,) = numbers(hand.reader, RUN)
    assert (each.value("rollouts", "all"), each.value("reward/mean", "all")) == (1.0, 1.0)


@pytest.mark.engine  # a whole run of its own
def test_a_refresh_reads_only_the_new_step(tmp_path, monkeypatch):
    root = tmp_path / "store"
    rehearse(root, "a", steps=1)
    library, read = StoreReader.at(root), what_is_read(monkeypatch)
    (first,) = numbers(library, "a")
    assert read == [("metrics", 0)], "one look at the one table"
    rehearse(root, "a", steps=2)
    again, _ = numbers(library, "a")
    assert again.values == first.values
    numbers(library, "a")
    assert read == [("metrics", 0), ("metrics", 1)]

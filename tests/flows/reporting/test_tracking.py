"""The figures of a run on their way to W&B and TensorBoard: names, what is left out or refused, and real files."""

import json
import math
import sys
from types import ModuleType
from unittest.mock import Mock

import pytest

from configs.run import RunConfig
from configs.services import TensorboardTracking
from flows.reporting.figures import evaluation_figures, step_figures, tracked_name
from flows.reporting.tracking import (
    TrackedRow,
    TrackingError,
    TrackingWatcher,
    finite,
    is_sampled,
    open_sink,
    track,
)
from flows.services.ownership import identity, owned_processes
from tests.fixtures.tracked import Written, events, scalars, texts, wandb_history, wandb_records

SAMPLE = {"trace": "t0", "prompt": "a | b\nc", "reply": "d", "reward": 0.5}


def _config(**tracking):
    return RunConfig.model_validate({"name": "demo-1", "seed": 7, "tracking": tracking})


NAMES = """
-     update/learning_rate          optim/lr
-     updates/grad_norm/mean        optim/grad_norm
-     updates/loss/mean             loss/mean
-     updates/entropy/mean          entropy/mean
words entropy                       entropy/words/mean
-     updates/mismatch_kl/max       mismatch_kl/max
-     update/tokens_per_second      perf/throughput
-     update/mfu                    perf/mfu
-     update/peak_reserved_gib      perf/peak_memory
-     timing/stage/rollout          time/rollout
-     tokens_per_second/rollout     perf/throughput/rollout
words reward/mean                   reward/words/mean
all   reward/mean                   reward/all/mean
all   rewards/exact/mean            rewards/exact/mean
words rewards/exact/mean            rewards/words/exact/mean
words is_truncated                  is_truncated/words/mean
all   errored_rollout/timeout       error/all/timeout
words metrics/steps                 metrics/words/steps
-     update/loss                   -
-     updates/learning_rate/mean    -
-     batch/reward_mean             -
"""
"""Environment, metric, and the name that trackers get; a dash is none."""


@pytest.mark.parametrize("line", NAMES.strip().splitlines())
def test_figures_are_named_as_others_name_them(line):
    environment, metric, name = (word.strip("-") for word in line.split())
    assert tracked_name(environment, metric) == (name or None)


def test_the_seconds_of_a_step_are_those_of_its_stages():
    values = {("", "timing/stage/rollout"): 2.0, ("", "timing/stage/training"): 3.0, ("all", "timing/setup"): 9.0}
    seconds = {"time/rollout": 2.0, "time/training": 3.0, "timing/all/setup": 9.0, "time/step": 5.0}
    assert step_figures(values) == seconds


def _scores(average):
    counts = {"environment": "sums", "num_examples": 4, "num_attempts": 8, "errors": {"timeout": 1}}
    passed = [{"k": 1, "estimate": average, "interval": None}]
    return counts | {"average": average, "interval": average and {"low": 0.25, "high": 0.75}, "pass_at": passed}


def test_an_evaluation_has_its_intervals_and_nothing_that_was_not_scored():
    found = evaluation_figures({"version": 3, "set": "hard", "scores": [_scores(0.5)]})
    figures = {"avg@2": 0.5, "avg@2/low": 0.25, "avg@2/high": 0.75, "pass@1": 0.5, "num_errors": 1.0}
    assert found == {f"eval/hard/sums/{name}": value for name, value in figures.items()} | {"eval/version": 3.0}
    unscored = evaluation_figures({"version": 0, "set": "", "scores": [_scores(None)]})
    assert unscored == {"eval/sums/num_errors": 1.0, "eval/version": 0.0}
    assert evaluation_figures({"version": 0, "set": "sums", "scores": [_scores(None)]}) == unscored, "of a table"


def test_what_is_not_finite_is_left_out_and_named(caplog):
    assert finite({"a": 1.0, "b": math.nan, "c": -math.inf}) == ({"a": 1.0}, ["b", "c"])
    sink = Written()
    assert track([TrackedRow(2, {"a": 1.0}), TrackedRow(3, {"a": 1.0, "loss": math.nan})], sink) == 2
    assert sink.rows == [TrackedRow(2, {"a": 1.0}), TrackedRow(3, {"a": 1.0})]
    assert caplog.messages == ["step 3: metrics that are not finite were left out: loss"]


def test_online_without_a_key_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(TrackingError, match=r"did not start in mode online: .*key"):
        open_sink(_config(type="wandb", mode="online"), tmp_path / "w").__enter__()


def test_the_files_of_tensorboard_have_the_figures_the_samples_and_the_config(tmp_path):
    config = _config(type="tensorboard")
    with open_sink(config, tmp_path) as sink:
        assert str(tmp_path / "tensorboard") in sink.where
        track([TrackedRow(0, {"reward/all/mean": 0.25}, [SAMPLE]), TrackedRow(1, {"reward/all/mean": 0.5})], sink)
    found = events(tmp_path / "tensorboard")
    assert scalars(found) == {0: {"reward/all/mean": 0.25}, 1: {"reward/all/mean": 0.5}}
    table = ["| trace | prompt | reply | reward |", "|---|---|---|---|", "| t0 | a \\| b c | d | 0.5 |"]
    assert texts(found, "samples") == {0: "\n".join(table)}
    assert json.loads(texts(found, "config")[0])["seed"] == 7


def test_steps_that_are_sent_again_replace_those_of_earlier_files(tmp_path):
    for first in (0, 1):
        with open_sink(_config(type="tensorboard"), tmp_path) as sink:
            track([TrackedRow(step, {"loss/mean": float(first)}) for step in (first, 2)], sink)
    written = events(tmp_path / "tensorboard")
    started = [event.step for event in written if event.HasField("session_log")]
    assert started == [0, 1], "each file says from which step on it counts, and none overwrites another"
    assert scalars(written) == {0: {"loss/mean": 0.0}, 1: {"loss/mean": 1.0}, 2: {"loss/mean": 1.0}}


@pytest.mark.engine
@pytest.mark.essential
def test_an_offline_run_is_read_back_row_by_row(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))  # wandb has advice for who imports it
    asked = {"entity": "team", "group": "tries", "tags": ["small", "first"], "notes": "a try", "job_type": "probe"}
    # So many figures that records go on from one block of the file to the next.
    rows = [TrackedRow(step, {f"figure/{n}": step + n / 8 for n in range(60)}) for step in range(40)]
    rows[10] = TrackedRow(10, {"loss/mean": 0.5, "odd": math.nan}, [SAMPLE])
    with open_sink(_config(type="wandb", **asked), tmp_path) as sink:
        track([*rows, TrackedRow(7, {"eval/sums/avg@1": 0.5, "eval/version": 7.0})], sink)
        where = sink.where
    [file] = tmp_path.glob("wandb/offline-run-*/run-demo-1.wandb")
    assert f"wandb sync {file.parent}" in where
    history = wandb_history(file)
    table = {name: history[10].pop(name) for name in [*history[10]] if name.startswith("samples/")}
    wanted = [{"_step": row.step, **finite(row.figures)[0]} for row in rows]
    wanted[39] |= {"eval/sums/avg@1": 0.5, "eval/version": 7.0}  # what comes late is sent where it is still taken
    assert history == wanted
    sent = json.loads((file.parent / "files" / table["samples/path"]).read_text())
    assert sent == {"columns": [*SAMPLE], "data": [[*SAMPLE.values()]]}
    [run] = [record.run for record in wandb_records(file) if record.HasField("run")]
    told = (run.run_id, run.entity, run.run_group, list(run.tags), run.notes, run.job_type, run.project)
    assert told == ("demo-1", "team", "tries", ["small", "first"], "a try", "probe", "stagecoach")
    assert {each.key: json.loads(each.value_json) for each in run.config.update}["seed"] == 7
    assert any(record.HasField("stats") for record in wandb_records(file)), "statistics of the machine"
    assert owned_processes(identity()) == []
    assert capfd.readouterr() == ("", "")


def _step(number, computed=True):
    facts = {"step": number, "computed": computed, "values": {("all", "reward/mean"): 1.0}}
    return facts | {"samples": lambda count: [{"trace": f"{number}"}] * count}


def test_what_is_sent_of_a_run_samples_each_so_many_steps_and_services_that_were_lost():
    sink = Written()
    watch = TrackingWatcher(sink, TensorboardTracking(samples_every=2, num_samples=3))
    for step, event in enumerate(("lost", "note", "lost")):
        watch("step", _step(step))
        watch(event, {"service": "engine"})
    watch("step", _step(3, computed=False))
    for version, computed in ((1, True), (2, False)):
        watch("evaluation", {"version": version, "set": "", "scores": [_scores(0.5)], "computed": computed})
    assert [(row.step, len(row.samples)) for row in sink.rows] == [(0, 3), (1, 0), (2, 3), (1, 0)]
    assert [row.figures.get("services/lost") for row in sink.rows[:3]] == [None, 1.0, 1.0]
    assert not is_sampled(0, TensorboardTracking(samples_every=0))


def test_trouble_with_a_sink_is_told_of_once_and_the_run_goes_on(caplog):
    sink = Written()
    sink.write = Mock(side_effect=OSError("no space"))
    watch = TrackingWatcher(sink, TensorboardTracking())
    for step in range(3):
        watch("step", _step(step))
    assert caplog.messages == ["metrics no longer reach a list, the run goes on: no space"]

"""The figures of a run on their way to W&B and TensorBoard: names, what is left out or refused, and real files."""

import json
import logging
import math
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from configs.run import RunConfig
from configs.services import TensorboardTracking, WandbTracking
from flows.reporting.figures import evaluation_figures, step_figures, tracked_name
from flows.reporting.tracking import (
    TrackedRow,
    TrackingError,
    TrackingWatcher,
    beginning,
    check_tracking,
    finite,
    is_sampled,
    open_sink,
    track,
)
from flows.services.ownership import identity, owned_processes
from tests.fixtures.tracked import Written, events, scalars, texts, wandb_history, wandb_records

SAMPLE = {"trace": "t0", "prompt": "a | b\nc", "reply": "d", "reward": 0.5}


def _config(**tracking: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "demo-1", "seed": 7, "tracking": tracking})


def test_figures_are_named_as_others_name_them():
    names = {
        ("", "update/learning_rate"): "optim/lr",
        ("", "updates/grad_norm/mean"): "optim/grad_norm",
        ("", "updates/loss/mean"): "loss/mean",
        ("", "updates/entropy/mean"): "entropy/mean",
        ("words", "entropy"): "entropy/words/mean",
        ("", "updates/mismatch_kl/max"): "mismatch_kl/max",
        ("", "update/tokens_per_second"): "perf/throughput",
        ("", "update/mfu"): "perf/mfu",
        ("", "update/peak_reserved_gib"): "perf/peak_memory",
        ("", "timing/stage/rollout"): "time/rollout",
        ("", "tokens_per_second/rollout"): "perf/throughput/rollout",
        ("words", "reward/mean"): "reward/words/mean",
        ("all", "reward/mean"): "reward/all/mean",
        ("all", "rewards/exact/mean"): "rewards/exact/mean",
        ("words", "rewards/exact/mean"): "rewards/words/exact/mean",
        ("words", "is_truncated"): "is_truncated/words/mean",
        ("all", "errored_rollout/timeout"): "error/all/timeout",
        ("words", "metrics/steps"): "metrics/words/steps",
        ("", "update/loss"): None,
        ("", "updates/learning_rate/mean"): None,
        ("", "batch/reward_mean"): None,
    }
    assert {key: tracked_name(*key) for key in names} == names
    values = {("", "timing/stage/rollout"): 2.0, ("", "timing/stage/training"): 3.0, ("all", "timing/setup"): 9.0}
    seconds = {"time/rollout": 2.0, "time/training": 3.0, "timing/all/setup": 9.0, "time/step": 5.0}
    assert step_figures(values) == seconds


def _scores(average: float | None) -> dict[str, Any]:
    return {
        "environment": "sums",
        "num_examples": 4,
        "num_attempts": 8,
        "errors": {"timeout": 1},
        "average": average,
        "interval": None if average is None else {"low": 0.25, "high": 0.75},
        "pass_at": [{"k": 1, "estimate": average, "interval": None}],
    }


def test_an_evaluation_has_its_intervals_and_nothing_that_was_not_scored():
    found = evaluation_figures({"version": 3, "set": "hard", "scores": [_scores(0.5)]})
    where = "eval/hard/sums"
    assert found == {
        **{f"{where}/avg@2": 0.5, f"{where}/avg@2/low": 0.25, f"{where}/avg@2/high": 0.75},
        **{f"{where}/pass@1": 0.5, f"{where}/num_errors": 1.0, "eval/version": 3.0},
    }
    assert evaluation_figures({"version": 0, "set": "", "scores": [_scores(None)]}) == {
        "eval/sums/num_errors": 1.0,
        "eval/version": 0.0,
    }


def test_what_is_not_finite_is_left_out_and_named(caplog):
    assert finite({"a": 1.0, "b": math.nan, "c": -math.inf}) == ({"a": 1.0}, ["b", "c"])
    sink = Written()
    with caplog.at_level(logging.WARNING, "stagecoach"):
        assert track([TrackedRow(2, {"a": 1.0}), TrackedRow(3, {"a": 1.0, "loss": math.nan})], sink) == 2
    assert sink.rows == [TrackedRow(2, {"a": 1.0}), TrackedRow(3, {"a": 1.0})]
    said = ["step 3: metrics that are not finite were left out: loss"]
    assert [record.getMessage() for record in caplog.records] == said


def test_without_tracking_nothing_is_imported_or_written(tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom configs.run import RunConfig\n"
        "from flows.reporting.tracking import open_sink\n"
        f"with open_sink(RunConfig(name='run'), Path({str(tmp_path / 'w')!r})) as sink: pass\n"
        "print('wandb' in sys.modules, 'tensorboardX' in sys.modules, sink)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.split() == ["False", "False", "None"]
    assert not (tmp_path / "w").exists()


def test_online_without_a_key_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    online = WandbTracking(mode="online")
    with (
        pytest.raises(TrackingError, match="set WANDB_API_KEY, or run `wandb login`"),
        open_sink(_config(type="wandb", mode="online"), tmp_path / "w"),
    ):
        pass
    assert not (tmp_path / "w").exists()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    check_tracking(online)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    with pytest.raises(TrackingError):
        check_tracking(online)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    check_tracking(online)
    check_tracking(WandbTracking())


def test_a_run_goes_on_in_its_own_and_a_replay_forks_the_recorded_one(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    with pytest.raises(TrackingError, match="branches"):
        check_tracking(WandbTracking(branches="fork"))
    fork, plain = WandbTracking(mode="online", branches="fork"), WandbTracking(mode="online")
    check_tracking(fork)
    replay = {"kind": "replay", "replay": {"run": "demo", "first_step": 3}}
    branch = RunConfig.model_validate({"name": "b", **replay})
    assert beginning(branch, fork, known=False) == {"fork_from": "demo?_step=2"}
    assert beginning(branch, fork, known=True) == {"resume": "allow"}
    from_start = branch.model_copy(update={"replay": branch.replay.model_copy(update={"first_step": 0})})
    assert beginning(from_start, fork, known=False) == {"resume": "allow"}
    assert beginning(branch, plain, known=False) == {"resume": "allow"}
    assert beginning(branch, WandbTracking(), known=True) == {}


def test_the_files_of_tensorboard_have_the_figures_the_samples_and_the_config(tmp_path):
    config = _config(type="tensorboard")
    with open_sink(config, tmp_path) as sink:
        assert sink is not None and str(tmp_path / "tensorboard") in sink.where
        track([TrackedRow(0, {"reward/all/mean": 0.25}, [SAMPLE]), TrackedRow(1, {"reward/all/mean": 0.5})], sink)
    found = events(tmp_path / "tensorboard")
    assert scalars(found) == {0: {"reward/all/mean": 0.25}, 1: {"reward/all/mean": 0.5}}
    table = ["| trace | prompt | reply | reward |", "|---|---|---|---|", "| t0 | a \\| b c | d | 0.5 |"]
    assert texts(found, "samples") == {0: "\n".join(table)}
    assert json.loads(texts(found, "config")[0])["seed"] == 7


def test_steps_that_are_sent_again_replace_those_of_earlier_files(tmp_path):
    for first in (0, 1):
        with open_sink(_config(type="tensorboard"), tmp_path) as sink:
            assert sink is not None
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
        assert sink is not None
        track([*rows, TrackedRow(7, {"eval/sums/avg@1": 0.5, "eval/version": 7.0})], sink)
        where = sink.where
    [file] = tmp_path.glob("wandb/offline-run-*/run-demo-1.wandb")
    assert f"wandb sync {file.parent}" in where
    history = wandb_history(file)
    table = {name: history[10].pop(name) for name in [*history[10]] if name.startswith("samples/")}
    late = history[-1]
    wanted = [{"_step": row.step, **finite(row.figures)[0]} for row in rows]
    wanted[-1] |= {"eval/sums/avg@1": 0.5, "eval/version": 7.0}
    assert late["_step"] == 39, "an evaluation that comes late is sent where it is still taken"
    assert history == wanted
    assert json.loads((file.parent / "files" / table["samples/path"]).read_text()) == {
        "columns": list(SAMPLE),
        "data": [list(SAMPLE.values())],
    }
    [run] = [record.run for record in wandb_records(file) if record.HasField("run")]
    told = (run.run_id, run.entity, run.run_group, list(run.tags), run.notes, run.job_type, run.project)
    assert told == ("demo-1", "team", "tries", ["small", "first"], "a try", "probe", "stagecoach")
    assert {each.key: json.loads(each.value_json) for each in run.config.update}["seed"] == 7
    assert any(record.HasField("stats") for record in wandb_records(file)), "statistics of the machine"
    assert owned_processes(identity()) == []
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


def _step(number: int, **others: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"step": number, "computed": True, "values": {("all", "reward/mean"): 1.0}}
    return facts | {"samples": lambda count: [{"trace": f"{number}"}] * count} | others


def test_what_is_sent_of_a_run_samples_each_so_many_steps_and_services_that_were_lost():
    sink = Written()
    watch = TrackingWatcher(sink, TensorboardTracking(samples_every=2, num_samples=3))
    for step in range(3):
        watch("step", _step(step))
        watch("lost" if step != 1 else "note", {"service": "engine"})
    watch("step", _step(3, computed=False))
    for version, computed in ((1, True), (2, False)):
        watch("evaluation", {"version": version, "set": "", "scores": [_scores(0.5)], "computed": computed})
    assert [(row.step, len(row.samples)) for row in sink.rows] == [(0, 3), (1, 0), (2, 3), (1, 0)]
    assert [row.figures.get("services/lost") for row in sink.rows[:3]] == [None, 1.0, 1.0]
    assert not is_sampled(0, TensorboardTracking(samples_every=0))


def test_trouble_with_a_sink_is_told_of_once_and_the_run_goes_on(caplog):
    class Refusing(Written):
        def write(self, row: TrackedRow) -> None:
            raise OSError("no space")

    watch = TrackingWatcher(Refusing(), TensorboardTracking())
    with caplog.at_level(logging.WARNING, "stagecoach"):
        for step in range(3):
            watch("step", _step(step))
    said = ["metrics no longer reach a list, the run goes on: no space"]
    assert [record.getMessage() for record in caplog.records] == said

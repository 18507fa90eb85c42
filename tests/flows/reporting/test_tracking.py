"""Metrics on their way to Weights & Biases: what is left out, what is refused, and a real offline run."""

import json
import logging
import math
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.services import WandbConfig
from flows.reporting.tracking import Monitor, MonitorError, MonitorWatcher, check_monitor, finite
from flows.services.ownership import identity, owned_processes


def test_what_is_not_finite_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert finite({"a": 1.0, "b": math.nan, "c": -math.inf}) == ({"a": 1.0}, ["b", "c"])
    with Monitor(WandbConfig(), "run", tmp_path) as monitor, caplog.at_level(logging.WARNING, "stagecoach"):
        monitor.log(3, {"a": 1.0})
        assert not caplog.records
        monitor.log(3, {"a": 1.0, "loss": math.nan})
    assert [record.getMessage() for record in caplog.records] == [
        "step 3: metrics that are not finite were left out: loss"
    ]


def test_disabled_imports_nothing_and_writes_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; from flows.reporting.tracking import Monitor; from configs.services import WandbConfig\n"
        f"monitor = Monitor(WandbConfig(), 'run', {str(tmp_path / 'w')!r})\n"
        "monitor.log(0, {'a': 1.0}); monitor.close()\n"
        "print('wandb' in sys.modules, monitor.directory)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.split() == ["False", "None"]
    assert not (tmp_path / "w").exists()


def test_online_without_a_key_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    online = WandbConfig(mode="online")
    with pytest.raises(MonitorError, match="set WANDB_API_KEY, or run `wandb login`"):
        Monitor(online, "run", tmp_path)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    check_monitor(online)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    with pytest.raises(MonitorError):
        check_monitor(online)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    check_monitor(online)
    check_monitor(WandbConfig(mode="offline"))


@pytest.mark.engine
def test_an_offline_run_is_on_disk_with_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with Monitor(WandbConfig(mode="offline"), "demo-1", tmp_path, {"seed": 7}) as monitor:
        monitor.log(0, {"reward/all/mean": 0.25, "loss": math.nan})
        monitor.log(1, {"reward/all/mean": 0.5})
        directory = monitor.directory
        assert directory is not None
    assert directory.is_relative_to(tmp_path)
    [file] = directory.glob("run-demo-1.wandb")
    assert _history(file) == [{"_step": 0, "reward/all/mean": 0.25}, {"_step": 1, "reward/all/mean": 0.5}]
    assert owned_processes(identity()) == []


def _history(file: Path) -> list[dict[str, Any]]:
    """The history rows in a file of an offline run, without the fields of time.

    The file is a log of protocol buffers: a header of 7 bytes, then records, each whole behind 7 bytes of its own
    (checksum, length, 1 for whole) as long as all fit into the first 32 kB.
    """
    from wandb.proto import wandb_internal_pb2

    content, place, rows = file.read_bytes(), 7, []
    assert len(content) < 32_768
    while place < len(content):
        _, length, kind = struct.unpack_from("<IHB", content, place)
        assert kind == 1
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content[place + 7 : place + 7 + length])
        place += 7 + length
        items = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        rows.append({name: value for name, value in items.items() if name not in ("_runtime", "_timestamp")})
    return [row for row in rows if row]


def test_lost_services_are_counted_beside_the_metrics_of_the_steps_that_follow() -> None:
    logged: dict[int, dict[str, float]] = {}
    watch = MonitorWatcher(cast(Any, SimpleNamespace(log=lambda step, metrics: logged.update({step: metrics}))))
    for step in range(4):
        watch("step", {"step": step, "computed": True, "metrics": {"x": 1.0}})
        if step in (0, 2):
            watch("lost", {"service": "engine"})
    assert logged == {
        0: {"x": 1.0},
        **{step: {"x": 1.0, "services/lost": lost} for step, lost in ((1, 1), (2, 1), (3, 2))},
    }

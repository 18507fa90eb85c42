"""Metrics of a step with exact values, and a real offline run of Weights & Biases."""

import json
import logging
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs.services import WandbConfig
from flows.metrics import finite, step_metrics
from flows.reporting.tracking import Monitor, MonitorError, check_monitor
from flows.services.ownership import identity, owned
from storage.schemas.stage_tables import TRACES, VERDICTS


def traces(*rows: dict[str, Any]) -> pa.Table:
    """Traces with the given columns, all others as empty as their type allows."""
    empty = {field.name: _empty(field.type) for field in TRACES.arrow if not field.nullable}
    return pa.Table.from_pylist([{**empty, "metrics": "{}", **row} for row in rows], schema=TRACES.arrow)


def verdicts(*rows: tuple[str, bool, list[str]]) -> pa.Table:
    columns = ("trace_id", "keep", "detected")
    filled = [{**dict(zip(columns, row, strict=True)), "group_id": "g", "evidence": "{}"} for row in rows]
    return pa.Table.from_pylist(filled, schema=VERDICTS.arrow)


def _empty(kind: pa.DataType) -> Any:
    return "" if pa.types.is_string(kind) else False if pa.types.is_boolean(kind) else 0


TABLES = (
    traces(
        {
            "trace_id": "a",
            "environment": "one",
            "trainable": True,
            "reward": 1.0,
            "num_output_tokens": 10,
            "generation_seconds": 2.0,
            "metrics": '{"length": 3, "note": "text"}',
        },
        {"trace_id": "b", "environment": "one", "trainable": True, "reward": 0.0, "num_output_tokens": 20},
        {"trace_id": "c", "environment": "two", "trainable": True, "is_truncated": True, "error_class": "timeout"},
        {"trace_id": "d", "environment": "two", "trainable": False, "reward": 0.5, "metrics": '{"length": 5}'},
    ),
    verdicts(("a", True, []), ("b", False, ["gibberish"]), ("c", False, ["errored", "truncated"]), ("d", True, [])),
)


def test_metrics_of_a_step_for_all_and_by_environment() -> None:
    update = {"loss": -0.5, "entropy": None, "has_optimizer": True, "policy_key_in": "k", "metrics": '{"extra": 2}'}
    found = step_metrics(*TABLES, update, {"trained": 1, "filtered": 2}, {"rollout": 1.5}, ["repetition"])
    expected = {
        "rollouts/all": 4,
        "reward/all/mean": 0.5,
        "reward/all/std": math.sqrt(1 / 6),
        "reward/all/min": 0,
        "reward/all/max": 1,
        "reward/one/mean": 0.5,
        "reward/two/mean": 0.5,
        "errored_rollout/all": 0.25,
        "errored_rollout/all/timeout": 0.25,
        "errored_rollout/one": 0,
        "errored_rollout/two": 0.5,
        "is_truncated/all": 0.25,
        "num_output_tokens/all": 7.5,
        "num_output_tokens/one": 15,
        "timing/one/generation": 1,
        "timing/stage/rollout": 1.5,
        "metrics/all/length": 4,
        "metrics/two/length": 5,
        "filters/all/gibberish": 0.25,
        "filters/all/errored": 0.25,
        "filters/all/repetition": 0,
        "filters/all/is_filtered": 0.5,
        "filters/one/gibberish": 0.5,
        "filters/two/is_filtered": 0.5,
        "trainable/all/count": 1,
        "trainable/all/ratio": 0.25,
        "trainable/one/ratio": 0.5,
        "trainable/two/ratio": 0,
        "update/loss": -0.5,
        "update/extra": 2,
        "accounting/trained": 1,
        "accounting/filtered": 2,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert not {"update/entropy", "update/policy_key_in", "update/metrics", "metrics/all/note"} & found.keys()
    assert all(type(value) is float for value in found.values())


def test_agents_of_one_environment_have_rewards_of_their_own() -> None:
    won = {"environment": "duel", "trainable": True}
    rows = [
        {"trace_id": f"{agent}{number}", "agent": agent, "reward": reward, **won}
        for agent, rewards in (("first", (1.0, -0.5)), ("second", (-1.0, 0.5)))
        for number, reward in enumerate(rewards)
    ]
    lost = {"trace_id": "lost", "environment": "duel", "agent": "agent", "error_class": "timeout"}
    alone = {"trace_id": "alone", "environment": "one", "agent": "agent", "reward": 1.0}
    found = step_metrics(traces(*rows, lost, alone), verdicts(), None, {}, {})
    assert {name: value for name, value in found.items() if name.startswith("reward/") and name.endswith("/mean")} == {
        "reward/all/mean": 0.2,
        "reward/duel/mean": 0.0,
        "reward/duel/first/mean": 0.25,
        "reward/duel/second/mean": -0.25,
        "reward/one/mean": 1.0,
    }


def test_scopes_are_symmetric() -> None:
    found = step_metrics(*TABLES, None, {}, {}, ["repetition"])
    for name in [name for name in found if name.startswith("filters/")]:
        _, scope, rest = name.split("/")
        assert {f"filters/{other}/{rest}" for other in ("all", "one", "two")} <= found.keys()
        assert scope in ("all", "one", "two")


def test_a_step_without_a_scored_or_any_rollout_has_no_reward() -> None:
    unscored = traces({"trace_id": "a", "environment": "one", "error_class": "model"})
    found = step_metrics(unscored, verdicts(), None, {}, {})
    assert found["errored_rollout/one"] == 1
    assert not [name for name in found if name.startswith(("reward/", "filters/", "trainable/"))]
    assert step_metrics(traces(), verdicts(), None, {}, {}) == {"rollouts/all": 0}


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
        "import sys; from flows.reporting.tracking import Monitor; from configs.sections import WandbConfig\n"
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
    assert owned(identity()) == []


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


def test_tables_here_are_of_the_contract() -> None:
    assert TABLES[0].schema == TRACES.arrow
    assert TABLES[1].schema == VERDICTS.arrow

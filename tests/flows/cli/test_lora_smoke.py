"""The smoke test of adapters: what it prints and returns, and that the engine that is installed here passes."""

from pathlib import Path

import pytest

from configs.errors import ConfigError
from flows.cli import lora_smoke
from tasks.inference.engine.checks import ProbeResult

PASSED, FAILED = ProbeResult("swaps", True, "5 swaps"), ProbeResult("mixed batch", False, "the base is off by 0.5 nats")


@pytest.mark.parametrize(("found", "status"), [([PASSED], 0), ([FAILED, PASSED], 1)])
def test_every_probe_has_its_line_and_one_that_fails_decides(
    found: list[ProbeResult], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lora_smoke, "probes", lambda config: iter(found))
    assert lora_smoke.lora_smoke("model.path=/x") == status
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{'PASS' if each.passed else 'FAIL'}  {each.name}: {each.detail}" for each in found]


def test_weights_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # which is no model for not being named
    with pytest.raises(ConfigError, match=r"model\.path: say which directory"):
        lora_smoke.lora_smoke()


@pytest.mark.engine
@pytest.mark.essential
def test_the_engine_here_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tasks.learner.tiny import tiny_qwen3

    model = tiny_qwen3(tmp_path / "model", seed=3, tied=True)
    settings = [f"model.path={model}", "training.lora={rank=3, alpha=6}", "engine.startup_seconds=600"]
    assert lora_smoke.lora_smoke(*settings) == 0
    names = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["PASS  mixed batch", "PASS  swaps", "PASS  slowdown"]

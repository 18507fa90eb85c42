"""The checks of tests/gpu/learner_checks.py tell a healthy device from one that is not; on the CPU."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.training import TrainingConfig
from tests.fixtures.policies import CPU
from tests.gpu import learner_checks

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("world")]

ROOT = Path(__file__).parents[3]
SETTINGS = TrainingConfig(dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("device", "capability", "name", "passed"),
    [
        ("cuda", (9, 0), "fa4", True),
        ("cuda", (9, 0), "fa2", None),
        ("cuda", (10, 0), "fa2", None),
        ("cuda", (12, 0), "fa2", True),
        ("cpu", None, "segments", True),
    ],
)
def test_slow_attention_is_no_success(device, capability, name, passed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    check = learner_checks._attention(name, torch.device(device))
    assert (check["measured"], check["passed"]) == (name, passed)
    assert ("slower than expected" in check["expected"]) == (passed is None)


@pytest.mark.parametrize("leaks", [False, True])
def test_samples_that_see_each_other_are_found(leaks, model_directory, monkeypatch):
    run_row = learner_checks.run_row

    def run_as_one_sample(policy, row, device):
        merged = replace(row, sample_ids=row.sample_ids[:1], borders=(0, row.borders[-1]))
        return run_row(policy, merged, device)

    if leaks:
        monkeypatch.setattr(learner_checks, "run_row", run_as_one_sample)
    row = learner_checks._row(64, 4)
    beside, alone = learner_checks._apart(model_directory, SETTINGS, row, CPU)
    assert (beside["passed"], alone["passed"]) == ((False, False) if leaks else (True, True))
    assert leaks or float(beside["measured"]) < 1e-6


def test_a_device_is_checked_and_measured_with_torch_transformers_and_a_few_small_packages():
    missing = (
        "deltalake",
        "arro3",
        "polars",
        "duckdb",
        "vllm",
        "prefect",
        "verifiers",
        "renderers",
        "cyclopts",
        "peft",
    )
    program = f"import sys; sys.modules |= dict.fromkeys({missing}); "
    program += "import tests.gpu.learner_checks, benchmarks.learner_gpu, tasks.learner.trainer"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

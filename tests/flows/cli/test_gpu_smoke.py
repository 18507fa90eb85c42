"""The acceptance of a GPU: what it prints and returns, and that a machine without one passes all the rest."""

import json
import subprocess
import sys

import pytest

from configs.load import load
from flows.cli import gpu_smoke
from flows.services.memory import smallest_gpu
from tasks.learner.tiny import tiny_qwen3

RIGHT = {"name": "checksum", "measured": "equal", "expected": "that of the files", "passed": True}
NOTED = {"name": "MFU", "measured": "40%", "expected": "noted", "passed": None}
WRONG = {"name": "GPU", "measured": "none", "expected": "one by NVIDIA", "passed": False}


@pytest.mark.parametrize(("found", "status"), [([RIGHT, NOTED], 0), ([WRONG, RIGHT], 1)])
def test_every_check_has_its_line_and_one_that_is_wrong_decides(found, status, monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu_smoke, "checks", lambda files, overrides, tokens: iter(found))
    assert gpu_smoke.gpu_smoke() == status
    head, *lines = capsys.readouterr().out.splitlines()
    assert "measured" in head and "expected" in head
    verdicts = {True: "OK", False: "WRONG"}
    assert [line.split()[0] for line in lines] == [verdicts.get(check["passed"], check["name"]) for check in found]
    assert gpu_smoke.gpu_smoke(as_json=True) == status
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == found


@pytest.mark.nightly
@pytest.mark.engine
def test_a_process_that_ends_early_is_wrong(tmp_path) -> None:
    (check,) = gpu_smoke.learner_checks({"model": str(tmp_path / "model")})
    assert check["passed"] is False and "scratch" not in check["name"] and "training" in check["measured"]


@pytest.mark.engine
@pytest.mark.nightly
def test_ranks_have_the_gradient_of_one(tmp_path) -> None:
    config = load(["demo"], [])
    request = {"model": str(tiny_qwen3(tmp_path / "model", layers=2, seed=3)), "tokens": 128}
    request |= {"training": config.training.model_dump(mode="json"), "learner": config.learner.model_dump(mode="json")}
    check = gpu_smoke.rank_check(request, config.learner, 2)
    assert check["passed"] is True, check
    lost = gpu_smoke.rank_check({**request, "model": str(tmp_path / "none")}, config.learner, 2)
    assert lost["passed"] is False and lost["expected"] == "all ranks end"


@pytest.mark.engine
@pytest.mark.nightly
def test_the_processor_passes_all_but_that_it_is_no_gpu() -> None:
    if smallest_gpu():
        pytest.skip("this machine has a GPU")
    settings = ["engine.startup_seconds=600", "engine.memory_gib=0.25", "engine.max_model_len=256"]
    # In a process of its own: a run needs one that has not imported Prefect yet, and leaves it a server.
    command = [sys.executable, "-m", "flows.cli", "gpu-smoke", "demo", *settings, "--tokens", "256", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    found = {check["name"]: check for check in lines}
    wrong = {name: check["expected"] for name, check in found.items() if check["passed"] is False}
    assert wrong == {"GPU": "one by NVIDIA"}, str(wrong)
    assert {"the same weights twice", "a policy written and read", "checksum of the engine's weights"} <= found.keys()
    assert {"engine killed, serves again after", "learner killed, holds its policy after"} <= found.keys()
    assert {"engine killed asleep, serves again after", "stage training of the last step"} <= found.keys()
    assert found["steps, the learner killed in one"]["measured"] == "5"
    # A run whose learner was not lost would take no time to go on.
    assert float(found["from that kill to the next stage"]["measured"].removesuffix(" s")) > 1
    assert float(found["learner: tokens a second"]["measured"]) > 0

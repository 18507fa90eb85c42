"""The commands gpu-smoke and lora-smoke: the lines and status of the tests that they run."""

import json
from pathlib import Path

import pytest

from flows.cli import smoke
from flows.cli.arguments import UsageError
from flows.services import gpus
from flows.services.gpus import parse_gpu, smallest_gpu

CONFTEST = Path(smoke.TESTS / "conftest.py").read_text()
CHECKS = """\
def test_one(check):
    check('checksum', 'equal', 'that of the files', True)
    check('MFU', '40%', 'noted', None)
"""
WRONG = "\ndef test_two(check):\n    check('GPU', 'none', 'one by NVIDIA', False)\n"
RAISED = "\ndef test_three():\n    raise ValueError('no memory')\n"


@pytest.mark.engine
@pytest.mark.essential
@pytest.mark.parametrize(("text", "verdicts"), [(CHECKS, [True, None]), (CHECKS + WRONG + RAISED, [True, None, 0, 0])])
def test_every_check_has_its_line_and_one_that_is_wrong_decides(text, verdicts, monkeypatch, tmp_path, capfd):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_machine.py").write_text(text)
    monkeypatch.setattr(smoke, "TESTS", tmp_path)
    status = 1 if 0 in verdicts else 0
    assert smoke.gpu_smoke(as_json=True) == status
    checks = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [check["passed"] for check in checks] == verdicts
    assert checks[-1]["measured"] == ("ValueError: no memory" if status else "40%")
    assert smoke.gpu_smoke() == status
    verdict = {True: "OK", None: "MFU", False: "WRONG"}
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == [verdict[passed] for passed in verdicts]


GIVEN = """
def test_settings(config, smoke, check):
    training = config.training
    settings = [training.device, training.dtype, training.policy_dtype, str(training.compile), config.engine.dtype]
    check("settings", " ".join(settings), str(smoke["quick"]), None)
"""


@pytest.mark.engine
@pytest.mark.parametrize(
    ("items", "gpu", "settings"),
    [
        ((), "H200", "cuda bfloat16 bfloat16 auto auto"),
        (("training.dtype=float32", "training.policy_dtype=float32"), "H200", "cuda float32 float32 auto auto"),
        ((), "", "cpu float32 float32 auto auto"),
        (("demo",), "H200", "cpu float32 float32 auto float32"),
    ],
)
def test_without_files_a_gpu_computes_in_half_precision(items, gpu, settings, monkeypatch, tmp_path, capfd):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_machine.py").write_text(GIVEN)
    monkeypatch.setattr(smoke, "TESTS", tmp_path)
    monkeypatch.setattr(gpus, "smallest_gpu", lambda: parse_gpu(gpu) if gpu else None)
    assert smoke.gpu_smoke(*items, quick=bool(gpu), as_json=True) == 0
    (line,) = map(json.loads, capfd.readouterr().out.splitlines())
    assert (line["measured"], line["expected"]) == (settings, str(bool(gpu)))


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(smoke, "TESTS", tmp_path)
    with pytest.raises(UsageError, match="an installed package does not bring: clone the project"):
        smoke.gpu_smoke()


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.skipif(smallest_gpu() is not None, reason="this machine has a GPU")
def test_the_processor_passes_all_but_that_it_is_no_gpu(capfd):
    settings = ["engine.startup_seconds=600", "engine.memory_gib=0.25", "engine.max_model_len=256"]
    assert smoke.gpu_smoke("demo", *settings, tokens=256, as_json=True) == 1
    checks = {check["name"]: check for check in map(json.loads, capfd.readouterr().out.splitlines())}
    wrong = {name: check["expected"] for name, check in checks.items() if check["passed"] is False}
    assert wrong == {"GPU": "one by NVIDIA"}
    assert {"torch's attention", "a sample beside others, nats", "hand-over: checksum"} <= checks.keys()
    # Its peak of memory is that of a step alone.
    assert [*checks].index("tokens a second") < [*checks].index("the same weights twice")
    assert {"the same weights twice", "a policy written and read", "checksum of the engine's weights"} <= checks.keys()
    assert "gradient of 2 ranks beside one, norm" in checks
    assert {"engine killed, serves again after", "learner killed, holds its policy after"} <= checks.keys()
    assert {"engine killed asleep, serves again after", "stage training of the last step"} <= checks.keys()
    assert checks["steps, the learner killed in one"]["measured"] == "5"
    # Recovery takes no time in a run whose learner was not lost.
    assert float(checks["from that kill to the next stage"]["measured"].removesuffix(" s")) > 1
    assert float(checks["learner: tokens a second"]["measured"]) > 0

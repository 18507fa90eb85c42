"""Accepts a machine with a GPU: what learner and engine do there is measured and compared with what is expected.

Learner checks run in a process of their own. Then an engine and a learner start as in a run, over a store that is
removed afterwards: weights are handed over and proven, the engine sleeps and wakes, and both are killed.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from configs.load import load
from configs.run import RunConfig
from flows.cli import doctor
from flows.services.base import Supervisor
from flows.services.engine import InferenceService
from flows.services.learner import LearnerProcess, recorded_policy
from flows.services.memory import smallest_gpu
from flows.services.process import ServiceFailed
from storage.store import open_store
from tasks.inference.engine import model_info
from tasks.inference.engine.checks import EngineMismatch, check_serving, check_weights, tolerance
from tasks.inference.engine.client import Engine, EngineError, EngineLost
from tasks.learner.protocol import LearnerError, LearnerLost
from tasks.runtime.execute import perform
from tasks.runtime.process_variables import inherited_variables
from tasks.runtime.run_context import RunContext
from tasks.runtime.services import Services
from tasks.runtime.stage import Policy
from tasks.runtime.start_module import module_command
from tasks.training import policy as policy_import

CHECKS = "tasks.learner.device_checks"
RECOVERY_SECONDS = 15.0
"""Longest time from the death of a learner until it holds its policy again, its start left out."""
Check = dict[str, Any]
"""`name`, `measured`, `expected`, and `passed`: null where a figure is only noted."""
FAILURES = (ServiceFailed, EngineMismatch, EngineError, EngineLost, LearnerError, LearnerLost)


def main(files: Sequence[str], overrides: Sequence[str], tokens: int = 4096, as_json: bool = False) -> int:
    """Print a line for each check as it is made; return 1 where one is wrong, else 0.

    Without files the demo's settings count, in the precision of the device.
    """
    passed = True
    if not as_json:
        print(f"{'':6} {'check':42} {'measured':30} expected")
    for check in checks(load(files, overrides) if files else load(["demo"], ["engine.dtype=auto", *overrides]), tokens):
        verdict = {True: "OK", False: "WRONG", None: ""}[check["passed"]]
        line = f"{verdict:6} {check['name']:42} {check['measured']:30} {check['expected']}"
        print(json.dumps(check) if as_json else line, flush=True)
        passed &= check["passed"] is not False
    return 0 if passed else 1


def checks(config: RunConfig, tokens: int) -> Iterator[Check]:
    """Yield what was found, of the weights that `model.path` names, or of a small random model."""
    gpu = smallest_gpu()
    yield _check("GPU", gpu.name if gpu else "none", "one by NVIDIA", gpu is not None)
    for found in doctor.gpus():
        yield _check("machine", found.what, found.advice or "as it is", found.level != "bad")
    with tempfile.TemporaryDirectory(prefix="stagecoach-gpu-smoke-") as directory:
        given = config.model.path
        model = model_info.model_directory(given) if given else Path(directory) / "model"
        training = config.training.model_copy(update={"device": "cuda" if gpu else "cpu"})
        request = {"model": str(model), "scratch": directory, "tokens": tokens}
        request |= {
            name: each.model_dump(mode="json") for name, each in (("training", training), ("learner", config.learner))
        }
        yield from learner_checks(request)
        if not model.exists():  # nothing could be made of it
            return
        settings = config.model.model_copy(update={"path": str(model), "vocab_size": model_info.read(model).vocab_size})
        engine = config.engine.model_copy(update={"sleep": True})
        config = config.model_copy(
            update={"name": "gpu-smoke", "model": settings, "training": training, "engine": engine}
        )
        yield from service_checks(config, model, Path(directory))


def learner_checks(request: Check) -> Iterator[Check]:
    """Yield what the learner finds, and where its process ends early what it said at last."""
    argv = module_command(CHECKS, json.dumps(request))
    with subprocess.Popen(
        argv, env=inherited_variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        output, errors = process.communicate()
    yield from (json.loads(line) for line in output.splitlines())
    if process.returncode:
        last = (errors.strip().splitlines() or ["nothing said"])[-1]
        yield _check("learner", last, "all checks end", False)


def service_checks(config: RunConfig, model: Path, directory: Path) -> Iterator[Check]:
    """Yield what engine and learner do as the services of a run; what fails ends the checks."""
    context = RunContext(open_store(directory / "store"), "gpu-smoke", config, {})
    with Supervisor("gpu-smoke", directory / "logs") as supervisor:
        engine = InferenceService(supervisor, context, model)
        learner = LearnerProcess(supervisor, context, engine.asleep)
        try:
            yield from _run_services(config, context, engine, learner, model)
        except FAILURES as error:
            yield _check("engine and learner", type(error).__name__, f"no failure: {error}", False)


def _run_services(
    config: RunConfig, context: RunContext, engine: InferenceService, learner: LearnerProcess, model: Path
) -> Iterator[Check]:
    engine.begin()
    starting, ref = _take_time(
        lambda: perform(
            policy_import.STAGE, context, 0, services=Services(learner=learner), parameters={"source": str(model)}
        )
    )
    policy = Policy(ref.key, 0)
    yield _check("learner starts and holds a policy", f"{starting:.1f} s", "noted", None)
    seconds, served = _take_time(lambda: engine.serve(policy))
    yield _check("engine starts and serves it", f"{seconds:.1f} s", "noted", None)
    row, weights = recorded_policy(context, policy.key), context.store.policies.directory(policy.key)
    with closing(Engine(served.url, engine.key)) as client:
        proven = check_weights(client, row, weights)
        yield _check("checksum of the engine's weights", "equal" if proven else "unknown", "that of the files", proven)
        off = check_serving(client, row, config.engine, same_weights=proven)
        most = "below a mean of 1" if proven else f"at most {tolerance(config.engine):g}"
        yield _check("log-probs of engine and learner", f"{off:.3g} nats at most apart", most, True)

    def turn() -> bool:
        with learner.turn(), closing(Engine(served.url, engine.key)) as client:
            return client.is_sleeping()

    seconds, slept = _take_time(turn)
    waking, _ = _take_time(lambda: engine.serve(policy))
    yield _check("engine sleeps, wakes and is proven", f"{seconds:.1f} s + {waking:.1f} s", "asleep in the turn", slept)
    os.kill(engine._handles["engine"].pid, signal.SIGKILL)
    seconds, _ = _take_time(lambda: engine.serve(policy))
    yield _check("engine killed, serves again after", f"{seconds:.1f} s", "its start, and proven again", True)
    os.kill(learner._handles["learner"].pid, signal.SIGKILL)
    seconds, _ = _take_time(lambda: learner.restore(policy))
    most_seconds = RECOVERY_SECONDS + starting
    yield _check(
        "learner killed, holds its policy after",
        f"{seconds:.1f} s",
        f"at most {most_seconds:.0f} s",
        seconds <= most_seconds,
    )


def _take_time(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.monotonic()
    found = call()
    return time.monotonic() - start, found


def _check(name: str, measured: str, expected: str, passed: bool | None) -> Check:
    return {"name": name, "measured": measured, "expected": expected, "passed": passed}

"""Acceptance of a machine with a GPU: `stagecoach gpu-smoke` runs these tests over a model of the user's.

The learner's checks run in a process of its own. Then an engine and a learner start as services of a run, and are
killed. Last is a run of a few steps whose learner is killed while it trains.
"""

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from configs.run import RunConfig
from flows.cli import doctor
from flows.cli.run import run_config
from flows.runtime.resolve_run import resolve_run
from flows.services.base import Supervisor
from flows.services.engine import InferenceService
from flows.services.gpus import gpus, smallest_gpu
from flows.services.guardian import send
from flows.services.learner import LearnerProcess
from flows.services.learner_recovery import recorded_policy
from flows.services.ownership import identity, marked_processes
from storage.store import open_store
from tasks.inference.engine import model_info
from tasks.inference.engine.checks import check_serving, check_weights, tolerance
from tasks.inference.engine.client import Engine
from tasks.learner.client import ranks_command
from tasks.learner.tiny import tiny_qwen3
from tasks.runtime.process_variables import module_command
from tasks.runtime.run_context import RunContext
from tasks.runtime.services import Services
from tasks.runtime.stage import Policy, perform
from tasks.training import policy as policy_import

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif("STAGECOACH_SMOKE" not in os.environ and smallest_gpu() is None, reason="needs a CUDA device"),
]
CHECKS = "tests.gpu.learner_checks"
RECOVERY_SECONDS = 15.0
"""Longest time from the death of a learner until it holds its policy again, its start excluded."""
MAX_RANK_DIFFERENCE = 0.02
"""Relative difference of gradient norms that ranks sum in another order."""
STEPS = 5
"""Steps of the run. The first ones start the learner and compile; its learner is killed after the second."""
OF_STEPS = (
    "rollout.max_off_policy_steps=0",  # the engine sleeps while the learner trains
    "assignment.groups_per_step=4",
    "assignment.group_size=4",
    "evaluation.every=0",
    # Groups of a model that has learnt nothing have no spread of rewards: they are trained all the same.
    "packing.zero_advantages=true",
    'filtering.filters=[{ type = "errored" }]',
)
METRICS = {
    "update/seconds_gradients": "s forward and backward",
    "update/seconds_optimizer": "s of the optimizer",
    "update/seconds_writing": "s to write the policy, the hand-over's first part",
    "update/tokens_per_second": "tokens a second",
    "update/tflops_per_second": "TFLOP/s",
    "update/mfu": "MFU",
    "update/peak_reserved_gib": "GiB reserved at most",
}


class Machine(NamedTuple):
    """The model and settings of all checks."""

    model: Path
    scratch: Path
    config: RunConfig
    request: dict[str, Any]
    """The request to `learner_checks`."""


@pytest.fixture(scope="module")
def machine(smoke, config, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("machine")
    if config.model.path:
        model = model_info.model_directory(config.model.path)
    else:
        model = tiny_qwen3(scratch / "model", hidden=256, heads=4, layers=2, seed=3)
    training = config.training.model_copy(update={"device": "cuda" if smallest_gpu() else "cpu"})
    request = {"model": str(model), "scratch": str(scratch), "tokens": smoke["tokens"]}
    request["training"], request["learner"] = (each.model_dump(mode="json") for each in (training, config.learner))
    settings = config.model.model_copy(update={"path": str(model), "vocab_size": model_info.read(model).vocab_size})
    engine = config.engine.model_copy(update={"sleep": True})
    sections = {"name": "gpu-smoke", "model": settings, "training": training, "engine": engine}
    return Machine(model, scratch, config.model_copy(update=sections), request)


def test_gpu_and_driver(check):
    gpu = smallest_gpu()
    check("GPU", gpu.name if gpu else "none", "one by NVIDIA", gpu is not None)
    for diagnose in (doctor.compiler, doctor.gpus):
        try:
            check("machine", diagnose(), "as it is", True)
        except doctor.Problem as problem:
            check("machine", str(problem), "no problem", False)


def test_learner(machine, variables, check):
    argv = module_command(CHECKS, json.dumps(machine.request))
    done = subprocess.run(argv, env=variables, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        check(**json.loads(line))
    assert done.returncode == 0, _last_line(done.stderr)


@pytest.mark.skipif(len(gpus()) == 1, reason="needs two GPUs")
def test_ranks_have_the_gradient_of_one(machine, variables, check):
    ranks = len(gpus()) or 2  # without a GPU, of processors
    one, several = (gradient_norm(machine, variables, processes, ranks) for processes in (1, ranks))
    difference = abs(several / one - 1)
    name, passed = f"gradient of {ranks} ranks beside one, norm", difference <= MAX_RANK_DIFFERENCE
    check(name, f"{difference:.3g}", f"at most {MAX_RANK_DIFFERENCE:g}", passed)


def gradient_norm(machine, variables, processes, num_rows):
    """Return the norm of the gradient of `num_rows` rows by so many processes; on CUDA each has a GPU."""
    learner = machine.config.learner.model_copy(update={"processes": processes})
    argv, more = ranks_command(learner, 0, CHECKS, json.dumps({**machine.request, "num_rows": num_rows}))
    done = subprocess.run(argv, env=variables | more, capture_output=True, text=True)
    assert done.returncode == 0, _last_line(done.stderr)
    return float(done.stdout)


def test_engine_and_learner_as_services(machine, smoke, check):
    context = RunContext(open_store(machine.scratch / "services"), "gpu-smoke", machine.config, {})
    with Supervisor("gpu-smoke", machine.scratch / "logs") as supervisor:
        engine = InferenceService(supervisor, context, machine.model)
        engine.learner = learner = LearnerProcess(supervisor, context, engine.asleep)
        engine.begin()
        source = str(machine.model)
        starting, ref = _take_time(
            lambda: perform(policy_import.STAGE, context, 0, services=Services(learner=learner), parameters=source)
        )
        policy = Policy(ref.key, 0)
        check("learner starts and holds a policy", f"{starting:.1f} s", "noted", None)
        seconds, served = _take_time(lambda: engine.serve(policy))
        check("engine starts and serves it", f"{seconds:.1f} s", "noted", None)
        with closing(Engine(served.url, engine.key)) as client:
            _check_policy(client, context, policy, check)

        def take_turn():
            with learner.turn(), closing(Engine(served.url, engine.key)) as client:
                return client.is_sleeping()

        seconds, asleep = _take_time(take_turn)
        waking, _ = _take_time(lambda: engine.serve(policy))
        check("engine sleeps, wakes and is proven", f"{seconds:.1f} s + {waking:.1f} s", "asleep in the turn", asleep)
        kills = ("engine killed", nullcontext), ("engine killed asleep", learner.turn)
        for name, turn in kills[: 1 if smoke["quick"] else 2]:
            with turn():
                _kill(engine)
            seconds, _ = _take_time(lambda: engine.serve(policy))
            check(f"{name}, serves again after", f"{seconds:.1f} s", "its start, and proven again", True)
        _kill(learner)
        seconds, _ = _take_time(lambda: learner.restore(policy))
        limit = RECOVERY_SECONDS + starting
        check("learner killed, holds its policy after", f"{seconds:.1f} s", f"at most {limit:.0f} s", seconds <= limit)


def _check_policy(client, context, policy, check):
    """Hand a policy over once more, part by part, and check what the engine serves then."""
    row, weights = recorded_policy(context, policy.key), context.store.policies.directory(policy.key)
    loading, _ = _take_time(lambda: client.serve(policy.key, weights))
    summing, equal = _take_time(lambda: check_weights(client, row, weights))
    probing, nats = _take_time(lambda: check_serving(client, row, context.config.engine, same_weights=equal))
    for part, seconds in {"weights loaded": loading, "checksum": summing, "log-probs of the probe": probing}.items():
        check(f"hand-over: {part}", f"{seconds:.2f} s", "noted", None)
    check("checksum of the engine's weights", "equal" if equal else "unknown", "that of the files", equal)
    limit = "below a mean of 1" if equal else f"at most {tolerance(context.config.engine):g}"
    check("log-probs of engine and learner", f"{nats:.3g} nats at most apart", limit, True)


def _kill(service):
    os.kill(service.handles[0].report["pid"], signal.SIGKILL)


class LearnerKiller:
    """Watches a run: kills its learner while it trains the third step, and collects the reports of the steps."""

    def __init__(self):
        self.steps = []
        self.recovery = 0.0
        """Seconds from the kill to the next stage; 0 if the learner was not killed while it trained."""
        self._killed_at = 0.0
        self._timer = None

    def __call__(self, event, facts):
        """Take an event of the run."""
        if event == "step":
            self.steps.append(dict(facts))
        elif event == "done" and facts["ref"].stage == "training" and self._timer:
            self._timer.cancel()  # the training ended first; the next step's is killed
        elif event == "stage" and self._killed_at:
            self.recovery = self.recovery or time.monotonic() - self._killed_at
        elif event == "stage" and facts["stage"] == "training" and len(self.steps) > 1:
            processes = [pid for pid, owner, name in marked_processes() if (owner, name[:7]) == (identity(), "learner")]
            assert processes, "the learner of a run is marked as its own"
            # After a quarter of the previous step's training: finding the processes takes long beside small models.
            self._timer = threading.Timer(self.steps[-1]["seconds"]["training"] / 4, self._kill, (processes,))
            self._timer.start()

    def _kill(self, processes):
        self._killed_at = time.monotonic()
        send(signal.SIGKILL, processes)


def test_steps_of_a_run_whose_learner_is_killed(smoke, machine, check):
    settings = {"model.path": machine.model, "store": machine.scratch / "store", "engine.sleep": "true"}
    settings["training.device"] = machine.config.training.device
    overrides = [*smoke["overrides"], *OF_STEPS, *(f"{key}={value}" for key, value in settings.items())]
    killer = LearnerKiller()
    run_config(resolve_run("train", smoke["files"], overrides, name="gpu-smoke-steps", steps=STEPS), (killer,))
    trained = sum(step["update"] is not None for step in killer.steps)
    check("steps, the learner killed in one", f"{trained}", f"{STEPS}", trained == STEPS)
    killed = bool(killer.recovery)
    check("from that kill to the next stage", f"{killer.recovery:.1f} s", "killed while it trains", killed)
    last = killer.steps[-1]
    for stage, seconds in last["seconds"].items():
        check(f"stage {stage} of the last step", f"{seconds:.2f} s", "noted", None)
    for name, unit in METRICS.items():
        if (value := last["metrics"].get(name)) is not None:
            check(f"learner: {unit}", f"{value:.3g}", "noted", None)


def _last_line(errors):
    return (errors.strip().splitlines() or ["no message"])[-1]


def _take_time(call):
    start = time.monotonic()
    outcome = call()
    return time.monotonic() - start, outcome

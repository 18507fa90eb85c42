"""Accepts a machine with a GPU: what learner and engine do there is measured and compared with what is expected.

Learner checks run in a process of their own. Then an engine and a learner start as in a run, over a store that is
removed afterwards: weights are handed over and proven, the engine sleeps and wakes, and both are killed. Last is a run
of a few steps, whose learner is killed while it trains.
"""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from configs.load import load
from configs.run import RunConfig
from configs.services import LearnerConfig
from flows.cli import doctor, launch
from flows.cli.arguments import Count, Json, option, split_items
from flows.runtime.prepare import prepare
from flows.services.base import RunService, Supervisor
from flows.services.engine import InferenceService
from flows.services.guardian import send
from flows.services.learner import LearnerProcess, recorded_policy
from flows.services.memory import gpus, smallest_gpu
from flows.services.ownership import identity, marked_processes
from flows.services.process import ServiceFailed
from storage.store import open_store
from tasks.inference.engine import model_info
from tasks.inference.engine.checks import EngineMismatch, check_serving, check_weights, tolerance
from tasks.inference.engine.client import Engine, EngineError, EngineLost
from tasks.learner.client import ranks_command
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
RANKS_APART = 0.02
"""Largest difference by share of a gradient's norm that ranks add up in another order."""
STEPS = 5
"""Steps of the run. Its learner is killed once, after the second: the first ones start it, and compile."""
OF_STEPS = (
    "rollout.max_off_policy_steps=0",  # the engine sleeps while the learner trains
    "assignment.groups_per_step=4",
    "assignment.group_size=4",
    "evaluation.every=0",
    # A model that has learnt nothing earns nothing: groups without any spread are trained all the same.
    "packing.zero_advantages=true",
    'filtering.filters=[{ type = "errored" }]',
)
FIGURES = {
    "update/seconds_gradients": "s forward and backward",
    "update/seconds_optimizer": "s of the optimizer",
    "update/seconds_writing": "s to write the policy",
    "update/tokens_per_second": "tokens a second",
    "update/tflops_per_second": "TFLOP/s",
    "update/mfu": "MFU",
    "update/peak_reserved_gib": "GiB reserved at most",
}
"""Of a step, those that the device has."""
Check = dict[str, Any]
"""`name`, `measured`, `expected`, and `passed`: null where a figure is only noted."""
FAILURES = (ServiceFailed, EngineMismatch, EngineError, EngineLost, LearnerError, LearnerLost)


def gpu_smoke(
    *items: Annotated[str, option("model.path=DIR; see below", "[FILES] [OVERRIDES]")],
    tokens: Annotated[Count, option("tokens of the row that is trained")] = 4096,
    as_json: Json = False,
) -> int:
    """Print a line for each check; return 1 if one is wrong, else 0.

    Without files the demo's settings apply, in the precision of the device.
    """
    files, overrides = split_items(items)
    passed = True
    if not as_json:
        print(f"{'':6} {'check':42} {'measured':30} expected")
    for check in checks(files or ["demo"], overrides if files else ["engine.dtype=auto", *overrides], tokens):
        verdict = {True: "OK", False: "WRONG", None: ""}[check["passed"]]
        line = f"{verdict:6} {check['name']:42} {check['measured']:30} {check['expected']}"
        print(json.dumps(check) if as_json else line, flush=True)
        passed &= check["passed"] is not False
    return 0 if passed else 1


def checks(files: Sequence[str], overrides: Sequence[str], tokens: int) -> Iterator[Check]:
    """Yield what was found, of the weights that `model.path` names, or of a small random model."""
    config, gpu = load(files, overrides), smallest_gpu()
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
        if len(gpus()) > 1:
            yield rank_check(request, config.learner, len(gpus()))
        settings = config.model.model_copy(update={"path": str(model), "vocab_size": model_info.read(model).vocab_size})
        engine = config.engine.model_copy(update={"sleep": True})
        config = config.model_copy(
            update={"name": "gpu-smoke", "model": settings, "training": training, "engine": engine}
        )
        yield from service_checks(config, model, Path(directory))
        own = [
            f"model.path={model}",
            f"store={directory}/store",
            "engine.sleep=true",
            f"training.device={training.device}",
        ]
        yield from step_checks(files, [*overrides, *OF_STEPS, *own])


def learner_checks(request: Check) -> Iterator[Check]:
    """Yield what the learner finds, and where its process ends early what it said at last."""
    argv = module_command(CHECKS, json.dumps(request))
    with subprocess.Popen(
        argv, env=inherited_variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        output, errors = process.communicate()
    yield from (json.loads(line) for line in output.splitlines())
    if process.returncode:
        yield _check("learner", _last_line(errors), "all checks end", False)


def rank_check(request: Check, learner: LearnerConfig, ranks: int) -> Check:
    """Compare the gradient of rows that so many ranks share with that of one rank; a rank has a GPU."""
    name, norms = f"gradient of {ranks} ranks beside one, norm", list[float]()
    for number in (1, ranks):
        chosen = learner.model_copy(update={"processes": number})
        argv, variables = ranks_command(chosen, 0, CHECKS, json.dumps({**request, "num_rows": ranks}))
        done = subprocess.run(
            argv, env={**inherited_variables(), **variables}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            return _check(name, _last_line(done.stderr), "all ranks end", False)
        norms.append(float(done.stdout))
    apart = abs(norms[1] / norms[0] - 1)
    return _check(name, f"{apart:.3g}", f"at most {RANKS_APART:g}", apart <= RANKS_APART)


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
    _kill(engine)
    seconds, _ = _take_time(lambda: engine.serve(policy))
    yield _check("engine killed, serves again after", f"{seconds:.1f} s", "its start, and proven again", True)
    with learner.turn():
        _kill(engine)
    seconds, _ = _take_time(lambda: engine.serve(policy))
    yield _check("engine killed asleep, serves again after", f"{seconds:.1f} s", "its start, and proven again", True)
    _kill(learner)
    seconds, _ = _take_time(lambda: learner.restore(policy))
    most_seconds = RECOVERY_SECONDS + starting
    yield _check(
        "learner killed, holds its policy after",
        f"{seconds:.1f} s",
        f"at most {most_seconds:.0f} s",
        seconds <= most_seconds,
    )


def _kill(service: RunService) -> None:
    process = service._handles[service.keyword].pid
    assert process, "it has answered"
    os.kill(process, signal.SIGKILL)


class StepWatch:
    """Watches a run: kills its learner while it trains, and keeps what the steps came to."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        """What each step came to, as `step_report.describe` has it."""
        self.recovery = 0.0
        """Seconds from the kill to the next stage; 0 where the learner was not killed while it trained."""
        self._killed_at = 0.0
        self._killing: threading.Timer | None = None

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        """Take an event of the run."""
        if event == "step":
            self.steps.append(dict(facts))
        elif event == "done" and facts["ref"].stage == "training" and self._killing:
            self._killing.cancel()  # it comes too late, unless it came: then in the next step
        elif event == "stage" and self._killed_at:
            self.recovery = self.recovery or time.monotonic() - self._killed_at
        elif event == "stage" and facts["stage"] == "training" and len(self.steps) > 1:
            # In a quarter of the time that the step before took. Looking for processes takes long beside small models.
            seconds, own = self.steps[-1]["seconds"]["training"] / 4, identity()
            processes = [
                each for each, owner, name in marked_processes() if owner == own and name.startswith("learner")
            ]
            assert processes, "the learner of a run is marked as its own"
            self._killing = threading.Timer(seconds, self._kill, (processes,))
            self._killing.start()

    def _kill(self, processes: Sequence[int]) -> None:
        self._killed_at = time.monotonic()
        send(signal.SIGKILL, processes)


def step_checks(files: Sequence[str], overrides: Sequence[str]) -> Iterator[Check]:
    """Yield what a run came to whose learner is killed while it trains, and the figures of its last step."""
    watch = StepWatch()
    try:
        launch.run(prepare("train", files, overrides, name="gpu-smoke-steps", steps=STEPS), (watch,))
    except Exception as error:
        yield _check("steps of a run", type(error).__name__, f"no failure: {error}", False)
        return
    trained = sum(step["update"] is not None for step in watch.steps)
    yield _check("steps, the learner killed in one", f"{trained}", f"{STEPS}", trained == STEPS)
    killed = bool(watch.recovery)
    yield _check("from that kill to the next stage", f"{watch.recovery:.1f} s", "killed while it trains", killed)
    last = watch.steps[-1]
    for stage, seconds in last["seconds"].items():
        yield _check(f"stage {stage} of the last step", f"{seconds:.2f} s", "noted", None)
    for name, unit in FIGURES.items():
        if (figure := last["metrics"].get(name)) is not None:
            yield _check(f"learner: {unit}", f"{figure:.3g}", "noted", None)


def _last_line(errors: str) -> str:
    return (errors.strip().splitlines() or ["nothing said"])[-1]


def _take_time(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.monotonic()
    found = call()
    return time.monotonic() - start, found


def _check(name: str, measured: str, expected: str, passed: bool | None) -> Check:
    return {"name": name, "measured": measured, "expected": expected, "passed": passed}

"""Seconds from the loss of a process to the next stage: `python -m benchmarks.recovery`; see recovery.md.

Real runs of three steps with a small model. In the middle of the second step one process is killed, or stopped. Printed
are the seconds until the next stage began, and what the run recorded. Each run must come to its end, with every rollout
and every step once in its tables. The run itself is killed, too, and resumed: seconds count from that command on.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flows.cli.run import run_config
from flows.runtime.resolve_run import resolve_run
from flows.services.ownership import SERVICE, identity, owned_processes
from storage.store import open_store
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.driving import check_once

ROOT = Path(__file__).parents[1]
STEPS, GROUPS, MEMBERS = 3, 6, 4
KILLED_IN = 1
"""The step in which the process is lost."""
HANG_SECONDS = 10.0
TWO_RANKS = ("learner.processes=2", f"learner.hang_seconds={HANG_SECONDS}")


@dataclass(frozen=True)
class Case:
    """What is lost, and when."""

    service: str
    """Its name begins so; empty is the run itself."""
    stage: str
    which: str = ""
    """Which of its processes (`role_of`); empty is all of them."""
    signal: int = signal.SIGKILL
    overrides: tuple[str, ...] = ()


CASES = {
    "learner": Case("learner", "training"),
    "a rank of two": Case("learner", "training", "rank 1", overrides=TWO_RANKS),
    "torchrun's agent": Case("learner", "training", "agent", overrides=TWO_RANKS),
    f"a rank of two, stopped; hang_seconds = {HANG_SECONDS:.0f}": Case(
        "learner", "training", "rank 1", signal.SIGSTOP, TWO_RANKS
    ),
    "engine": Case("engine", "rollout"),
    "one engine of two": Case("engine 2", "rollout", overrides=("engine.replicas=2",)),
    "environment server": Case("environment", "rollout"),
    "the run, resumed": Case("", "rollout"),
}


def processes(case: Case) -> list[psutil.Process]:
    """Return the processes of this run that a case takes, but not their guardians."""
    every = [psutil.Process(each) for each in owned_processes(identity())]
    own = [each for each in every if each.environ()[SERVICE].startswith(case.service)]
    return [each for each in own if case.which in (role := role_of(each), "") and role != "guardian"]


def role_of(process: psutil.Process) -> str:
    """Return whether a process is a guardian, a rank or the agent that started the ranks."""
    command, rank = process.cmdline(), process.environ().get("LOCAL_RANK")
    if rank is not None:
        return f"rank {rank}"
    return "guardian" if any(each.endswith("guardian.py") for each in command) else "agent"


def run_here(name: str, directory: str) -> None:
    """Run a case, or go on with its run, and print JSON lines of what happened when."""
    case, lost = CASES[name], threading.Event()
    store = f"{directory}/store"
    known = Path(store).exists()

    def say(event: str, **facts: Any) -> None:
        print(json.dumps({"event": event, "at": time.time(), **facts}), flush=True)

    def take() -> None:
        if case.service:
            taken = processes(case)
            assert taken, f"no process of {name}"
            say("lost", pids=[each.pid for each in taken])
            for each in taken:
                each.send_signal(case.signal)
        else:
            say("lost", pids=[os.getpid()])
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, facts: Mapping[str, Any]) -> None:
        if event == "stage":
            say("stage", stage=facts["stage"], step=facts["step"])
        # In the middle: the learner has its batch by then, and the first rollouts of the batch are committed.
        in_middle = (event == "rollouts" and facts["step"] == KILLED_IN and case.stage == "rollout") or (
            event == "stage" and (facts["stage"], facts["step"]) == ("training", KILLED_IN) and case.stage == "training"
        )
        if in_middle and not known and not lost.is_set():
            lost.set()
            take()

    say("begun")
    overrides = [f"model.path={directory}/model", *case.overrides]
    chosen = {"name": "recovery", "store": store, "seed": 7, "steps": STEPS}
    run_config(resolve_run("train", ["demo", str(ROOT / "tests/acceptance/small.toml")], overrides, **chosen), (watch,))


def lines_of(name: str, directory: str) -> Iterator[dict[str, Any]]:
    """Run a case in a new process; yield what it said."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.recovery", "--here", name, directory]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"{name}: ended with {done.returncode}")
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"event"'))


def measured(name: str) -> str:
    """Return the row of a case."""
    with tempfile.TemporaryDirectory(prefix="stagecoach-recovery-") as directory:
        tiny_qwen3(Path(directory) / "model", seed=3)
        said = list(lines_of(name, directory))
        if not CASES[name].service:
            said += lines_of(name, directory)
        (lost,) = (each for each in said if each["event"] == "lost")
        stage = CASES[name].stage
        after = [each for each in said if each["event"] == "stage" and each["at"] > lost["at"]]
        # A run that is resumed begins the stage again; a service is waited for within it.
        following = next(each for each in after if CASES[name].service == "" or each["stage"] != stage)
        began = next((each["at"] for each in said if each["event"] == "begun" and each["at"] > lost["at"]), lost["at"])
        store = open_store(f"{directory}/store")
        check_once(Path(directory) / "store")
        steps = {entry.step for entry in store.ledger.entries(run="recovery", stage="training")}
        assert steps == set(range(STEPS)), steps
        events = [each.message.split("; log")[0] for each in store.runs.lost_services("recovery")]
    return f"| {name} | {following['at'] - began:.1f} | {'. '.join(events) or '-'} |"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--here", nargs=2)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    if arguments.here:
        run_here(*arguments.here)
        return 0
    print("| lost | seconds to the next stage | events of the run |\n|---|---:|---|")
    for name in arguments.cases:
        print(measured(name), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

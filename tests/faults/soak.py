"""A soak: a run and the commands beside it are killed by SIGKILL at random, again and again: `make soak MINUTES=n`.

Each story is one run in an empty store, from its first process to the one that comes to the run's end. Rollouts are
fixed rows, so that tables, keys and weights must equal those of a run that nobody killed, bit for bit. With `--real` an
engine and an environment server sample, and are killed as well: then each rollout must be there once and none lost.
With `--stream` steps take their rollouts from a stream: each group must be in one step, none older than the bound, and
a replay of the recorded rollouts must train the same weights.
A kill counts where the process was there to be killed. Whatever must hold and does not is a loss; its store is kept.

The moment of a kill is uniform over about what its victim takes.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

from storage.errors import StoreError
from storage.maintenance.repair import inspect_logs, inspect_policies, inspect_slices, inspect_tables
from storage.store import open_store
from tasks.learner.tiny import tiny_qwen3
from tests.acceptance import program
from tests.crash.checks import check_same
from tests.fixtures.driving import NAME, ROOT, SETTINGS, Driven, check_once, check_replayed, rows
from tests.fixtures.histories import contents

COMMANDS = {
    "import": ["import", str(ROOT / "tests/tasks/exchange/files/tokens.jsonl"), "--name", "beside"],
    "export": ["export", NAME, "--format", "sft", "--to", "TARGET", "--force"],
    "maintain": ["maintain"],
    "gc": ["gc", "--keep", NAME, "--force", "beside", "--yes"],
    "repair": ["repair", "--deep"],
}
REAL = ("flow", "learner", "engine", "environment", "worker")
ALONE = ("gc", "repair")
"""Commands that are called while no run is at work."""
REAL_SECONDS = 45.0
"""About how long a run with real services takes."""
COMMAND_SHARE = 0.3
"""How long a command takes, of the time of a run."""
SHRINKS, GROWS = 0.8, 1.025
"""By these, where a kill came too late and where it did not: so one of ten comes too late."""
SAID_EVERY = 20
"""Kills after which the tally is printed, beside the end of each story."""
FLOW = "tests.fixtures.dying_run"
STREAM = ("steps=4", "rollout.max_off_policy_steps=2")
PATIENCE = 600.0
GIVEN_UP = 5
"""Stories with a loss after which there is no more to learn."""


@dataclass
class Tally:
    """What was killed, what was lost, and how long it took to go on."""

    kills: Counter[str] = field(default_factory=Counter)
    late: Counter[str] = field(default_factory=Counter)
    """Processes that had ended before they could be killed."""
    losses: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """From a kill to the next row of the ledger."""
    reach: dict[str, float] = field(default_factory=dict)
    """Seconds after which a victim is killed at the latest; they follow the load of the machine."""
    stories: int = 0

    def note(self, victim, killed):
        """Count a kill, or one that came too late, and let the moments of those to come follow from it."""
        (self.kills if killed else self.late)[victim] += 1
        self.reach[victim] *= GROWS if killed else SHRINKS
        if killed and self.kills.total() % SAID_EVERY == 0:
            print(self, flush=True)

    def __str__(self):
        each = ", ".join(f"{name} {number}" for name, number in sorted(self.kills.items()))
        spread = statistics.quantiles(self.seconds, n=10) if len(self.seconds) > 1 else []
        waits = (
            f"median {spread[4]:.1f}, 90th percentile {spread[8]:.1f}, most {max(self.seconds):.1f}" if spread else ""
        )
        return (
            f"{self.kills.total()} kills ({each}); {self.late.total()} came too late; {self.stories} runs ended; "
            f"{len(self.losses)} losses; seconds from a crash to the next row of the ledger: {waits or 'none'}"
        )


class Story:
    """One run in an empty store and what is done to it."""

    def __init__(self, place, model, chance, tally, real, more):
        self.run = Driven(place, (*SETTINGS, f"model.path={model}", "learner.max_restarts=1000", *more))
        self.chance, self.tally, self.real = chance, tally, real
        self.flow = None
        self.crashes = []
        self.imported = False

    def live(self, until):
        """Kill and call again until the run has come to its end; False where the time was up before."""
        victims = ["flow", "flow", "learner", *(["engine", "environment", "worker"] if self.real else COMMANDS)]
        while time.monotonic() < until:
            victim = self.chance.choice(victims)
            if victim in ALONE:
                self.kill_flow()
            elif self.flow is None:
                self.flow = self.begin()
            if victim in COMMANDS:
                self.kill_command(victim)
            else:
                self.kill_service(victim)
            if self.flow and self.flow.poll() is not None:
                return self.ended()
        self.end_flow()
        return False

    def begin(self):
        """Call the run in a new process."""
        overrides = list(self.run.overrides[len(SETTINGS) if self.real else 0 :])
        request = {"overrides": overrides, "kills": {}}
        request |= {"kill": "", "stop": "", "name": NAME, "prefect": False, "backwards": False, "replays": []}
        module = program.__name__ if self.real else FLOW
        return self.process([module, str(self.run.directory), json.dumps(request)])

    def process(self, arguments):
        """Start a module of this checkout, its output in the story's log."""
        variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
        with (self.run.directory / "log.txt").open("ab") as log:
            command = [sys.executable, "-P", "-m", *arguments]
            return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log)

    def kill_service(self, victim):
        """Kill the flow or one of its services after a while, with all that belongs to it but its guardian."""
        assert self.flow is not None
        deadline = time.monotonic() + self.chance.uniform(0.0, self.tally.reach[victim])
        killed = 0
        while not killed:
            if self.flow.poll() is not None:
                return self.tally.note(victim, killed=False)
            time.sleep(0.01)
            if time.monotonic() < deadline:
                continue
            if victim == "flow":
                return self.kill_flow()
            for each in self.processes(victim):  # none, where the service has not been started yet
                with suppress(psutil.NoSuchProcess):
                    each.kill()
                    killed += 1
        self.crashes.append(time.time())
        self.tally.note(victim, killed=True)

    def processes(self, victim):
        """Yield the processes to kill: a service's with its children, or a worker's of an environment."""
        service = "environment" if victim == "worker" else victim
        for report in (self.run.store / "logs" / NAME / "reports").glob(f"*/{service}*.json"):
            with suppress(psutil.NoSuchProcess, ValueError, KeyError, OSError):
                found = psutil.Process(json.loads(report.read_text())["pid"])
                children = found.children(recursive=True)
                yield from (
                    self.chance.sample(children, min(1, len(children))) if victim == "worker" else [found, *children]
                )

    def kill_command(self, name):
        """Call a command, kill it after a while, call it again and see that it ends as if nothing had happened."""
        if not (self.run.store / "tables/ledger").is_dir() or (name == "gc" and not self.imported):
            return
        before = self.damage_ledger() if name == "repair" else None
        target = self.run.directory / "exported.jsonl"
        arguments = ["flows.cli", *(str(target) if word == "TARGET" else word for word in COMMANDS[name])]
        arguments += ["--store", str(self.run.store)]
        process = self.process(arguments)
        time.sleep(self.chance.uniform(0.0, self.tally.reach[name]))
        process.kill()
        self.tally.note(name, killed=process.wait() == -signal.SIGKILL)
        if name == "export" and target.exists():
            assert [json.loads(line) for line in target.read_text().splitlines()], "a part of an export is there"
        removed = name == "gc" and not open_store(self.run.store).ledger.entries(run="beside")
        if name in ("import", "gc", "repair") and not removed:  # of what is gone, gc would say that it is not there
            assert self.process(arguments).wait(PATIENCE) == 0, f"{name} failed when it was called again"
        if name in ("import", "gc"):
            self.imported = name == "import"
            assert bool(open_store(self.run.store).ledger.entries(run="beside")) == self.imported
        if before is not None:
            # A row that a killed process had written and not committed may be there as well: its work is done.
            after = contents(open_store(self.run.store), [NAME])
            assert {row: after.get(row) for row in before} == before, "repair lost something"

    def damage_ledger(self):
        """Cut the newest commit of the ledger off; return what the run had before."""
        before = contents(open_store(self.run.store), [NAME])
        newest = max((self.run.store / "tables/ledger/_delta_log").glob("*.json"))
        newest.write_bytes(newest.read_bytes()[:40])
        return before

    def kill_flow(self):
        """Kill the flow, where there is one that has not ended."""
        if self.flow is None:
            return
        self.flow.kill()
        killed = self.flow.wait() == -signal.SIGKILL
        self.tally.note("flow", killed)
        if killed:
            self.crashes.append(time.time())
            self.flow = None
            check_undamaged(self.run.store)

    def end_flow(self):
        """Kill what is still there of a story that is at its end."""
        if self.flow is not None:
            self.flow.kill()
            self.flow.wait()

    def ended(self):
        """Assert that the run ended well; note how long it took after each crash to go on."""
        assert self.flow is not None
        assert self.flow.returncode == 0, f"the run ended with status {self.flow.returncode}"
        made = sorted(entry.finished_at.timestamp() for entry in open_store(self.run.store).ledger.entries(run=NAME))
        for crash, following in pairwise([*self.crashes, math.inf]):
            later = next((at for at in made if at > crash), None)
            if later is not None and later < following:
                self.tally.seconds.append(later - crash)
        return True


def check_undamaged(store):
    """Assert that a kill left nothing to repair: all that the ledger names is there, and is what it was."""
    if not (store / "tables/ledger/_delta_log").is_dir():
        return
    opened = open_store(store)
    left = [
        *inspect_logs(opened.root),
        *inspect_tables(opened),
        *inspect_slices(opened, deep=True),
        *inspect_policies(opened, deep=True),
    ]
    assert left == [], f"a kill left damage: {left}"


def check_real(run):
    """Assert that each rollout of a run with real services is there once, and none failed by a kill."""
    check_once(run.store)
    traces = rows(open_store(run.store))["traces"]
    assert len(traces) == len({row["assignment_id"] for row in traces}), "a rollout is there twice"
    assert [row["error_message"] for row in traces if row["error_class"]] == [], "a kill was put down to a rollout"


def check_stream(run):
    """Assert that each group is in one step, none older than the bound, and that a replay trains the same weights."""
    check_once(run.store)
    found = rows(open_store(run.store))
    taken = [row["group_id"] for row in found["intakes"]]
    assert sorted(taken) == sorted({row["group_id"] for row in found["assignments"]}), "a group is lost or there twice"
    assert all(0 <= row["age"] <= 2 for row in found["intakes"]), "a group is too old"
    check_replayed(run, len({row["step"] for row in found["intakes"]}))


def main():
    """Tell stories until the time is up; print what came out, and return 1 where anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--real", action="store_true", help="a real engine and environment server, killed as well")
    parser.add_argument("--stream", action="store_true", help="steps that take their rollouts from a stream")
    parser.add_argument("--update", default="wait", choices=["wait", "keep", "abort"], help="rollout.weight_update")
    arguments = parser.parse_args()
    more = (*STREAM, f"rollout.weight_update={arguments.update}") if arguments.stream else ()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    chance = random.Random(seed)
    print(f"seed {seed}", flush=True)
    place = Path(tempfile.mkdtemp(prefix="sc-soak-"))
    # An engine on the CPU wants larger heads than a learner alone needs.
    model = tiny_qwen3(place / "model", seed=3, **({} if arguments.real else {"hidden": 64, "layers": 2}))
    reference = Driven(place / "reference", (*SETTINGS, f"model.path={model}", "learner.max_restarts=1000", *more))
    reference.directory.mkdir()
    reach, began = dict.fromkeys(REAL, REAL_SECONDS), time.monotonic()
    if not arguments.real:
        assert reference.live().status == 0
        seconds = time.monotonic() - began
        reach = dict.fromkeys(REAL, seconds) | dict.fromkeys(COMMANDS, COMMAND_SHARE * seconds)
    tally = Tally(reach=reach)
    until = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < until and len(tally.losses) < GIVEN_UP:
        directory = Path(tempfile.mkdtemp(prefix="story-", dir=place))
        story = Story(directory, model, chance, tally, arguments.real, more)
        try:
            if story.live(until):
                if arguments.stream:
                    check_stream(story.run)
                if arguments.real:
                    check_real(story.run)
                elif not arguments.stream:  # a stream takes what ends first, which is another thing each time
                    check_same(story.run, reference)
                tally.stories += 1
            shutil.rmtree(directory)
        except (AssertionError, StoreError, subprocess.TimeoutExpired):
            tally.losses.append(f"{directory}: {traceback.format_exc(limit=-2)}")
            print(tally.losses[-1], flush=True)
        finally:  # of anything else, too, which is an error of the soak itself and ends it
            story.end_flow()
        print(tally, flush=True)
    if not tally.losses:
        shutil.rmtree(place)
    return min(len(tally.losses), 1)


if __name__ == "__main__":
    sys.exit(main())

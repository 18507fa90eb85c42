"""Steps an hour of real runs by `rollout.max_off_policy_steps`: `python -m benchmarks.async_running`.

Real engine, environment server, learner and store, on a taskset whose rollouts differ in length by twenty times
(long_tailed/). A round is a run for each bound and, from 2 on, each way to update weights, each in new processes, one
after the other. Printed are, of the steps after the first SKIPPED: steps an hour, how full the places for rollouts
were, the shares of the time in which none was taken and the learner waited, tokens' age, and processor seconds a step.
`--rounds`, `--steps`, `--bounds` and `--updates` say how much; a round of the defaults takes about seven minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.async_sampling import Outcome, outcome
from benchmarks.breakdown.processor import processor_seconds
from flows.cli import launch
from flows.runtime.prepare import prepare
from tasks.learner.tiny import tiny_qwen3

ROOT = Path(__file__).parents[1]
SKIPPED, STEPS, GROUPS, GROUP_SIZE, PLACES = 2, 12, 8, 4, 16
OVERRIDES = (
    "model.renderer=qwen3",
    'environments=[{name="long_tailed", taskset={id="long_tailed_taskset"}, harness={id="chat_loop"}, max_turns=2}]',
    f"assignment.groups_per_step={GROUPS}",
    f"assignment.group_size={GROUP_SIZE}",
    f"rollout.max_in_flight={PLACES}",
    "rollout.max_tokens=8",
    "engine.dtype=float32",
    "engine.max_model_len=128",
    "packing.tokens_per_row=512",
    "training.dtype=float32",
    "training.device=cpu",
    "evaluation.every=0",
)
Step = dict[str, Any]


def run_here(settings: Mapping[str, Any]) -> None:
    """Train in this process and print a JSON line for each step."""

    def watch(event: str, facts: Mapping[str, Any]) -> None:
        if event == "step":
            values = {name: value for (scope, name), value in facts["values"].items() if not scope}
            busy = sum(facts["metrics"][f"timing/all/{span}"] for span in ("setup", "generation", "scoring"))
            record = {"step": facts["step"], "wall": time.perf_counter(), "cpu": sum(processor_seconds().values())}
            record |= {"rollout_seconds": busy * facts["num_traces"]}
            print(json.dumps(record | {n: v for n, v in values.items() if n.startswith("stream/")}), flush=True)

    directory, bound = settings["directory"], settings["bound"]
    overrides = [*OVERRIDES, f"model.path={settings['model']}", f"rollout.max_off_policy_steps={bound}"]
    if bound > 1:
        overrides.append(f"rollout.weight_update={settings['update']}")
    config = prepare("train", [], overrides, name="long", store=f"{directory}/store", seed=17, steps=settings["steps"])
    launch.run(config, (watch,))


def measured(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of one run in new processes."""
    with tempfile.TemporaryDirectory(prefix="stagecoach-async-") as directory:
        text = json.dumps({**settings, "directory": directory})
        paths = os.pathsep.join(filter(None, (str(ROOT / "benchmarks/long_tailed"), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": paths}
        command = [sys.executable, "-m", "benchmarks.async_running", "--here", text]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return figures([json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')])


def figures(steps: Sequence[Step]) -> dict[str, float]:
    """Return the figures of the steps after the first ones."""
    kept = steps[SKIPPED - 1 :]
    seconds = sum(after["wall"] - before["wall"] for before, after in pairwise(kept))
    own, count = kept[1:], len(kept) - 1
    found = {"steps an hour": 3600 * count / seconds, "cpu s a step": (kept[-1]["cpu"] - kept[0]["cpu"]) / count}
    # Of the rollouts that the steps took: those that are under way at the end are not in it.
    found["full"] = sum(each["rollout_seconds"] for each in own) / (seconds * PLACES)
    total = sum(each.get("stream/seconds", 0.0) for each in own)
    for name in ("fullness", "engine_idle", "learner_waited") if total else ():
        found[name] = sum(each["stream/seconds"] * each[f"stream/{name}"] for each in own) / total
    if total:
        found["token age"] = sum(each["stream/token_age/mean"] for each in own) / count
    return found


def modelled(bound: int, update: str, learner: float, steps: int) -> Outcome:
    """Return what the model of `benchmarks.async_sampling` says of such a run; `learner` is its seconds a step."""
    import random

    chance = random.Random(17)
    lengths = [10.0 if chance.random() * 10 < 1 else 0.5 for _ in range(steps * GROUPS)]
    return outcome(bound, [[each] * GROUP_SIZE for each in lengths], PLACES, learner, update)


def main() -> None:
    """Measure rounds and print their table, with what the model says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--updates", nargs="+", default=["wait", "keep"], choices=["wait", "keep", "abort"])
    chosen = parser.parse_args()
    if chosen.here:
        run_here(json.loads(chosen.here))
        return
    sides = [(bound, update) for bound in chosen.bounds for update in (chosen.updates if bound > 1 else ["wait"])]
    found: dict[tuple[int, str], list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_qwen3(f"{directory}/model")
        for _ in range(chosen.rounds):
            for bound, update in sides:
                settings = {"bound": bound, "update": update, "steps": chosen.steps, "model": str(model)}
                found[bound, update].append(measured(settings))
                print(bound, update, json.dumps(found[bound, update][-1]), file=sys.stderr, flush=True)
    print(report(found, chosen.steps))
    print(f"\nload {', '.join(f'{each:.1f}' for each in os.getloadavg())}, rounds: {chosen.rounds}")


def report(found: Mapping[tuple[int, str], Sequence[Mapping[str, float]]], steps: int) -> str:
    """Return the table: medians over the rounds, and ratios to the first side within each round."""
    base = next(iter(found.values()))
    names = ("full", "fullness", "engine_idle", "learner_waited", "token age", "cpu s a step")
    lines = ["| n | weights | steps an hour | ratio | model's ratio | " + " | ".join(names) + " |"]
    lines.append("|---|---|" + "---:|" * (len(names) + 3))
    first = modelled(*next(iter(found)), learner=1.0, steps=steps)
    for (bound, update), rounds in found.items():
        ratio = median(own["steps an hour"] / other["steps an hour"] for own, other in zip(rounds, base, strict=True))
        model = first.seconds / modelled(bound, update, learner=1.0, steps=steps).seconds
        cells = [str(bound), update if bound > 1 else "", f"{median(each['steps an hour'] for each in rounds):.0f}"]
        cells += [f"{ratio:.2f}", f"{model:.2f}"]
        cells += [f"{median(each[name] for each in rounds):.2f}" if name in rounds[0] else "" for name in names]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

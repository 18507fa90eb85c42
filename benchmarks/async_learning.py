"""What a stream of rollouts costs in reward: `python -m benchmarks.async_learning`; see async_learning.md.

Trains presets of small models, warmed up once, with `rollout.max_off_policy_steps` of 0, 2 and 4: with the preset's own
loss, which corrects for the age of rollouts, and with the plain policy gradient, which does not. Each side has the same
seeds. Printed are the mean reward of the last steps and of all steps, with the spread over seeds, and the mean age of
tokens. A run ends early where all rollouts earn the same; the steps that it lacks count as its last one. `--presets`,
`--seeds`, `--steps` and `--update` say how much, `--overrides` what else is set; a run takes about a minute on two
quiet cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from benchmarks.fixtures.warming import warmed_up
from flows.cli.run import run_config
from flows.orchestration.states import EmptyBatch
from flows.runtime.resolve_run import resolve_run

if TYPE_CHECKING:
    from tasks.learner.losses.tokens import RlTokens, Term

ROOT = Path(__file__).parents[1]
LAST = 5
"""Steps at the end whose rewards are taken together."""
PLAIN = 'training.loss={type="custom", function="benchmarks.async_learning:policy_gradient"}'
LOSSES = {"own loss": "", "plain": PLAIN}
SIDES = {f"n = {bound}, {name}": (bound, loss) for bound in (0, 2, 4) for name, loss in LOSSES.items()}


def policy_gradient(rl: "RlTokens") -> "Term":
    """Return -A l: the gradient of what was sampled, as if the learner's policy had sampled it."""
    import torch

    from tasks.learner.losses.tokens import Term

    none = torch.zeros_like(rl.member)
    return Term(-rl.advantages * rl.logprobs, none, none)


def run_here(settings: Mapping[str, Any]) -> None:
    """Train in this process and print a JSON line for each step."""

    def watch(event: str, facts: Mapping[str, Any]) -> None:
        if event == "step":
            age = facts["values"].get(("", "stream/token_age/mean"), 0.0)
            print(json.dumps({"step": facts["step"], "reward": facts["reward"], "age": age}), flush=True)

    overrides = [f"model.path={settings['model']}", f"rollout.max_off_policy_steps={settings['bound']}"]
    overrides += ["evaluation.every=0", *settings["overrides"]]
    chosen = {"seed": settings["seed"], "steps": settings["steps"], "store": settings["store"]}
    # Raised where all rollouts earn the same: a broken policy earns nothing.
    with suppress(EmptyBatch):
        run_config(resolve_run("train", [settings["preset"]], overrides, name="learning", **chosen), (watch,))


def measured(settings: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the steps of one run in new processes."""
    with tempfile.TemporaryDirectory(prefix="stagecoach-learning-") as directory:
        text = json.dumps({**settings, "store": f"{directory}/store"})
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "benchmarks.async_learning", "--here", text]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]


def row(side: str, runs: Sequence[Sequence[Mapping[str, float]]], num_steps: int) -> str:
    """Return a line of the table: mean and standard deviation over runs of so many steps."""
    rewards = [[step["reward"] for step in (*steps, *[steps[-1]] * (num_steps - len(steps)))] for steps in runs]
    last, every = [mean(each[-LAST:]) for each in rewards], [mean(each) for each in rewards]
    spread = f" ± {stdev(last):.3f}" if len(last) > 1 else ""
    age = mean(step["age"] for steps in runs for step in steps)
    ended = ", ".join(str(len(steps)) for steps in runs if len(steps) < num_steps)
    return f"| {side} | {mean(last):.3f}{spread} | {mean(every):.3f} | {age:.2f} | {ended} |"


def main() -> None:
    """Measure all sides and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--presets", nargs="+", default=["demo", "calc_tools"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sides", nargs="+", default=[*SIDES], choices=[*SIDES])
    parser.add_argument("--update", default="wait", choices=["wait", "keep"])
    parser.add_argument("--overrides", nargs="+", default=[])
    chosen = parser.parse_args()
    if chosen.here:
        run_here(json.loads(chosen.here))
        return
    for preset in chosen.presets:
        with tempfile.TemporaryDirectory() as directory:
            model = warmed_up(f"{directory}/store", preset)
            print(f"\n| {preset} | reward, last {LAST} steps | reward, all steps | token age | ended after |")
            print("|---|---:|---:|---:|---|")
            for side in chosen.sides:
                bound, loss = SIDES[side]
                overrides = [*chosen.overrides, *([loss] if loss else [])]
                overrides += [f"rollout.weight_update={chosen.update}"] if bound else []
                settings = {"preset": preset, "model": model, "bound": bound, "overrides": overrides}
                runs = [measured({**settings, "seed": seed, "steps": chosen.steps}) for seed in chosen.seeds]
                print(row(side, runs, chosen.steps), flush=True)


if __name__ == "__main__":
    main()

"""A step beside TRL's GRPOTrainer at three sizes: `python -m benchmarks.against_trl --size middle`; see against_trl.md.

Model, prompts, reward, group sizes, token limit and learning rate are the same. The learning rate is so small that
replies keep their length. A round is a run of TRL and one of Stagecoach for each `rollout.max_off_policy_steps` of 0
and 1, each in new processes, one after the other; a ratio is that of one round. TRL is installed into a virtual
environment that also has the packages of this one, so that torch and transformers are the same build; `--trl DIR` keeps
it. `--model DIR` names warmed-up weights; without it a model of the size is warmed up first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.fixtures.processor import processor_seconds
from benchmarks.fixtures.warming import warmed_up
from flows.cli.run import run_config
from flows.runtime.demo_sources import demo_recipe
from flows.runtime.resolve_run import resolve_run

ROOT = Path(__file__).parents[1]
TRL = "trl==1.16.0"
PACKAGES = ("sample_reverse_text", "chat_loop")
"""Environments whose prompts and reward both sides use."""
LEARNING_RATE = 1e-7


@dataclass(frozen=True)
class Size:
    """What both sides train and sample."""

    max_tokens: int
    """Limit of a reply."""
    min_length: int
    """Characters of the shortest text to reverse."""
    max_length: int
    groups: int = 8
    group_size: int = 16
    trl_batch: int = 128
    """Rollouts in a batch of TRL, which accumulates gradients over the batches of a step."""
    model: Mapping[str, int] = field(default_factory=lambda: demo_recipe().model)
    updates: int = 200
    """Optimizer steps of the warm-up, of 32 demonstrations each."""
    skipped: int = 15
    """First steps, which are not measured: Prefect's server goes on starting for ten seconds after it answers."""
    steps: int = 45
    """All steps. The last is not measured either: nothing is sampled beside it."""


SIZES = {
    "small": Size(40, 3, 5),
    "middle": Size(
        *(128, 30, 50),
        model={"hidden": 256, "layers": 7, "heads": 4, "intermediate": 640},
        trl_batch=32,
        updates=120,
        skipped=3,
        steps=9,
    ),
    "large": Size(
        *(256, 80, 110, 4),
        model={"hidden": 512, "layers": 10, "heads": 8, "kv_heads": 4, "intermediate": 1408},
        trl_batch=16,
        updates=60,
        skipped=1,
        steps=4,
    ),
}
"""0.5, 5 and 30 million parameters."""


def install_trl(directory: Path) -> Path:
    """Return the Python of an environment that has TRL and sees this one's packages, made where it is missing."""
    python = directory / "bin/python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        packages = next(directory.glob("lib/python*/site-packages"))
        sites = [path for path in sys.path if path.endswith("site-packages")]
        sites += [str(ROOT / "examples" / name) for name in PACKAGES]
        # As directories of sites: their .pth files lead to this checkout.
        lines = "; ".join(f"site.addsitedir({path!r})" for path in sites)
        (packages / "stagecoach.pth").write_text(f"import site; {lines}\n", encoding="utf-8")
        command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", TRL]
        subprocess.run(command, check=True)
    return python


def write_prompts(path: Path, size: Size) -> None:
    """Write the environment's prompts as the renderer writes them, each with the expected answer, as JSON lines."""
    from sample_reverse_text.texts import prompt, texts

    with path.open("w", encoding="utf-8") as file:
        for text in texts(2000, size.min_length, size.max_length, 0):
            thought = "<think>\n\n</think>\n\n"  # of `enable_thinking = false`
            rendered = f"<|im_start|>user\n{prompt(text)}<|im_end|>\n<|im_start|>assistant\n{thought}"
            file.write(json.dumps({"prompt": rendered, "expected": text[::-1]}) + "\n")


def warmed_up_model(store: str, size: Size) -> str:
    """Return the directory of a model of the size that was warmed up on demonstrations of its texts."""
    recipe, count = demo_recipe(), 32 * size.updates
    lengths = f"--min-length {size.min_length} --max-length {size.max_length}"
    demonstrations = f"sample_reverse_text --count {count} --right 0.20 --untagged 0.77 {lengths} --seed 1"
    overrides = (
        *(*recipe.warm_up, f"assignment.groups_per_step={count}", f"packing.updates_per_step={size.updates}"),
        *(f"training.decay_steps={size.updates}", "data.max_length=512"),
    )
    return warmed_up(
        store, recipe=replace(recipe, model=size.model, demonstrations=(demonstrations,), warm_up=overrides)
    )


def run_stagecoach(settings: Mapping[str, Any]) -> None:
    """Train as the demo does, everything persisted, and print a JSON line for each step, as trl_steps.py does."""
    tokens = 0

    def watch(event: str, facts: Mapping[str, Any]) -> None:
        nonlocal tokens
        if event == "step":
            step, tokens = facts["step"] + 1, tokens + facts["tokens"]
            record = {"step": step, "wall": time.perf_counter(), "reward": facts["reward"], "tokens": tokens}
            if step in (settings["skipped"], settings["steps"] - 1):  # a look takes time, which would be each step's
                used = processor_seconds()
                assert "Prefect" in used, "the run reports to a server whose processor time would not be counted"
                record["cpu"] = sum(used.values())
            print(json.dumps(record), flush=True)

    lengths = f"min_length={settings['min_length']}, max_length={settings['max_length']}"
    taskset = f'{{id="sample_reverse_text", num_examples=2000, {lengths}}}'
    environment = f'{{name="reverse_text", taskset={taskset}, harness={{id="chat_loop"}}, max_turns=1}}'
    overrides = [
        f"environments=[{environment}]",
        f"model.path={settings['model']}",
        f"rollout.max_off_policy_steps={settings['max_off_policy_steps']}",
        f"assignment.groups_per_step={settings['groups']}",
        f"assignment.group_size={settings['group_size']}",
        f"rollout.max_tokens={settings['max_tokens']}",
        f"training.learning_rate={LEARNING_RATE}",
        "engine.max_model_len=512",
        "evaluation.every=0",
        "packing.zero_advantages=true",  # as TRL: all rollouts are trained on
    ]
    chosen = {"store": f"{settings['directory']}/store", "seed": settings["seed"], "steps": settings["steps"]}
    run_config(resolve_run("train", ["demo"], overrides, name="beside", **chosen), (watch,))


def measure(command: Sequence[str], settings: Mapping[str, Any]) -> dict[str, float]:
    """Run one side in a new process; return the means of the steps that are measured."""
    # Its store stays until the end: an ext4 without a journal passes over all that was just deleted at each new file.
    text = json.dumps({**settings, "directory": tempfile.mkdtemp(dir=settings["directory"])})
    # Without the Prefect of the warm-up: each run has a server of its own, whose processor time is part of it.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    variables |= {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, text], cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    steps = steps[settings["skipped"] - 1 : -1]
    means = {name: (steps[-1][name] - steps[0][name]) / (len(steps) - 1) for name in ("wall", "cpu", "tokens")}
    return means | {"reward": mean(step["reward"] for step in steps[1:])}


def rounds(python: Path, settings: Mapping[str, Any], number: int) -> Iterator[dict[str, dict[str, float]]]:
    """Yield the means of each round by side."""
    command = [sys.executable, "-m", "benchmarks.against_trl", "--here"]
    for _ in range(number):
        sides = {"TRL": measure([str(python), "benchmarks/fixtures/trl_steps.py"], settings)}
        for lag in (0, 1):
            sides[f"Stagecoach, n = {lag}"] = measure(command, {**settings, "max_off_policy_steps": lag})
        yield sides


def report(measured: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    """Return the table: medians over the rounds, and the ratios' range."""
    lines = ["| side | step, s | ratio | processor, s | ratio | tokens a step | reward |", "|---|" + "---:|" * 6]
    for side in measured[0]:
        middle = {name: median(sides[side][name] for sides in measured) for name in measured[0][side]}
        wall, cpu = (spread(sides[side][name] / sides["TRL"][name] for sides in measured) for name in ("wall", "cpu"))
        seconds = f"{middle['wall']:.2f} | {wall} | {middle['cpu']:.2f} | {cpu}"
        lines.append(f"| {side} | {seconds} | {middle['tokens']:.0f} | {middle['reward']:.2f} |")
    return "\n".join(lines)


def spread(ratios: Iterable[float]) -> str:
    """Return the median and the range."""
    ordered = sorted(ratios)
    return f"{median(ordered):.2f} ({ordered[0]:.2f} to {ordered[-1]:.2f})"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model")
    parser.add_argument("--trl", type=Path, help="directory of the environment with TRL, made where it is missing")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.here:
        run_stagecoach(json.loads(chosen.here))
        return
    size = SIZES[chosen.size]
    with tempfile.TemporaryDirectory(prefix="stagecoach-beside-") as directory:
        python = install_trl((chosen.trl or Path(directory, "trl")).resolve())
        write_prompts(prompts := Path(directory, "prompts.jsonl"), size)
        settings = asdict(size) | {
            "directory": directory,
            "model": chosen.model or warmed_up_model(f"{directory}/warm-up", size),
            "prompts": str(prompts),
            "learning_rate": LEARNING_RATE,
            "seed": 17,
        }
        print(report(list(rounds(python, settings, chosen.rounds))))


if __name__ == "__main__":
    main()

"""A step beside TRL's GRPOTrainer: `python -m benchmarks.against_trl`; the figures are in against_trl.md.

Model, prompts, reward, group sizes, token limit and learning rate are the same. A round is a run of TRL and one of
ours for each `max_off_policy_steps` of 0 and 1, each in new processes, one after the other; ratios are of one round.
For how much of a step neither engine nor learner is at work is seen in a further run: looking takes time. TRL goes
into a virtual environment of its own that sees our packages, so that torch and transformers are the same build; `--trl
DIR` keeps it. `--model DIR` names warmed-up weights; without it the demo's model is warmed up first.
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
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.breakdown.at_work import AtWork
from benchmarks.breakdown.processor import processor_seconds
from benchmarks.step_breakdown import warmed_up
from flows.cli import launch
from flows.runtime.prepare import prepare

ROOT = Path(__file__).parents[1]
TRL = "trl==1.16.0"
PACKAGES = ("sample_reverse_text", "chat_loop")
"""Environments whose prompts and reward both sides use."""
SKIPPED = 15
"""First steps of a run, which are not measured: Prefect's server goes on starting for ten seconds after it answers."""
SEED = 17
Step = dict[str, Any]


def install_trl(directory: Path) -> Path:
    """Return the Python of an environment that has TRL, made where it is missing; ours is seen from it, not changed."""
    python = directory / "bin/python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        packages = next(directory.glob("lib/python*/site-packages"))
        ours = [path for path in sys.path if path.endswith("site-packages")]
        own = [str(ROOT / "examples" / name) for name in PACKAGES]
        # As directories of sites: their .pth files lead to this checkout.
        sites = "; ".join(f"site.addsitedir({path!r})" for path in (*ours, *own))
        (packages / "ours.pth").write_text(f"import site; {sites}\n", encoding="utf-8")
        command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", TRL]
        subprocess.run(command, check=True)
    return python


def write_prompts(path: Path) -> None:
    """Write the demo's prompts as the renderer writes them, each with the expected answer, as JSON lines."""
    from sample_reverse_text.texts import ALPHABET, prompt, texts

    with path.open("w", encoding="utf-8") as file:
        for text in texts(2000, 3, 5, ALPHABET, 0):
            rendered = f"<|im_start|>user\n{prompt(text)}<|im_end|>\n<|im_start|>assistant\n"
            file.write(json.dumps({"prompt": rendered, "expected": text[::-1]}) + "\n")


def own_steps(settings: Mapping[str, Any]) -> None:
    """Train as the demo does, everything persisted, and print a JSON line for each step, as trl_steps.py does."""

    tokens, looking = list[int](), list[AtWork]()

    def watch(event: str, facts: Mapping[str, Any]) -> None:
        if event == "step":
            step = facts["step"] + 1
            tokens.append(facts["tokens"])
            record = {"step": step, "wall": time.perf_counter(), "reward": facts["reward"], "tokens": sum(tokens)}
            if step in (SKIPPED, settings["steps"]):  # looking takes time, of which each step would have its part
                used = processor_seconds()
                assert "Prefect" in used, "the run reports to a server whose processor time would not be counted"
                record |= {"cpu": sum(used.values()), "parts": used}
            if settings.get("watched"):
                looking[:] = looking or [AtWork({"engine", "learner"})]  # all of them are there by the first step
                record["neither"] = looking[0].take_idle_share()
            print(json.dumps(record), flush=True)

    overrides = [
        f"model.path={settings['model']}",
        f"rollout.max_off_policy_steps={settings['max_off_policy_steps']}",
        f"assignment.groups_per_step={settings['groups']}",
        f"assignment.group_size={settings['group_size']}",
        f"rollout.max_tokens={settings['max_tokens']}",
        f"training.learning_rate={settings['learning_rate']}",
        "evaluation.every=0",
    ]
    store, steps, seed = f"{settings['directory']}/store", settings["steps"], settings["seed"]
    launch.run(prepare("train", ["demo"], overrides, name="beside", store=store, seed=seed, steps=steps), (watch,))


def measured(command: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run one side in a new process; return seconds of wall-clock and processor a step, and what was sampled."""
    # It stays until the end: at each new file an ext4 without a journal passes over all that was deleted in the last
    # minutes, which took 2.7 % of both cores where a store of thousands of files had just been removed.
    text = json.dumps({**settings, "directory": tempfile.mkdtemp(dir=settings["directory"])})
    # Without the Prefect of the warm-up: each run has a server of its own, whose processor time is part of it.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = {**own, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([*command, text], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return per_step([json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')])


def per_step(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the means over the steps after SKIPPED: of a step's wall-clock, of its processor time, by part too."""
    kept = steps[SKIPPED - 1 :]
    walls = [after["wall"] - before["wall"] for before, after in pairwise(kept)]
    first, last, count = kept[0], kept[-1], len(kept) - 1
    parts = {name: (value - first["parts"].get(name, 0.0)) / count for name, value in last.get("parts", {}).items()}
    return {
        "wall": mean(walls),
        "median wall": median(walls),
        "cpu": (last["cpu"] - first["cpu"]) / count,
        "parts": parts,
        "tokens": (last["tokens"] - first["tokens"]) / count,
        "reward": mean(step["reward"] for step in kept[1:]),
        "neither": mean(step.get("neither", 0.0) for step in kept[1:]),
    }


def rounds(python: Path, settings: Mapping[str, Any], number: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield the figures of each round by side."""
    own = [sys.executable, "-m", "benchmarks.against_trl", "--own"]
    for _ in range(number):
        figures = {"TRL": measured([str(python), "benchmarks/trl_steps.py"], settings)}
        for off_policy in (0, 1):
            figures[f"ours, {off_policy} off-policy"] = measured(own, {**settings, "max_off_policy_steps": off_policy})
        watched = measured(own, {**settings, "max_off_policy_steps": off_policy, "watched": True})
        figures[f"ours, {off_policy} off-policy"]["neither"] = watched["neither"]
        yield figures


def report(found: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the figures as markdown: medians over the rounds, and the ratios' range."""
    lines = ["| side | step, s | ratio | processor, s | ratio | tokens | reward |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    for side in found[0]:
        cells = [side]
        for name in ("wall", "cpu"):
            cells.append(f"{median(each[side][name] for each in found):.2f}")
            cells.append(spread(each[side][name] / each["TRL"][name] for each in found))
        cells += [
            f"{median(each[side][name] for each in found):.{digits}f}"
            for name, digits in (("tokens", 0), ("reward", 2))
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for side in list(found[0])[1:]:
        parts = {name: median(each[side]["parts"][name] for each in found) for name in found[0][side]["parts"]}
        summary = ", ".join(f"{name} {value:.2f}" for name, value in sorted(parts.items(), key=lambda part: -part[1]))
        lines += ["", f"Processor seconds of {side}: {summary}."]
    idle = spread(each[side]["neither"] for each in found)
    lines += ["", f"Share of a step with neither engine nor learner at work, {side}: {idle}."]
    return "\n".join(lines)


def spread(values: Iterable[float]) -> str:
    """Return the median and the range."""
    sorted_values = sorted(values)
    return f"{median(sorted_values):.2f} ({sorted_values[0]:.2f} to {sorted_values[-1]:.2f})"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--model", help="directory of weights to start from")
    parser.add_argument("--trl", type=Path, help="directory of the environment with TRL, made where it is missing")
    parser.add_argument("--own", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.own:
        return own_steps(json.loads(chosen.own))
    with tempfile.TemporaryDirectory(prefix="stagecoach-beside-") as directory:
        python = install_trl((chosen.trl or Path(directory, "trl")).resolve())
        write_prompts(prompts := Path(directory, "prompts.jsonl"))
        settings = {
            "directory": directory,
            "model": chosen.model or warmed_up(f"{directory}/warm-up"),
            "prompts": str(prompts),
            "groups": 8,
            "group_size": 16,
            "max_tokens": 40,
            "learning_rate": 3e-4,
            "steps": chosen.steps,
            "seed": SEED,
        }
        print(report(list(rounds(python, settings, chosen.rounds))))


if __name__ == "__main__":
    sys.exit(main())

"""Where a step's wall-clock goes, by stage and by component: `python -m benchmarks.step_breakdown`.

Runs the demo's second half on the real stack (engine, environment server, learner, store, Prefect) at its own size and
prints the tables of step_breakdown.md. The flow's main thread is followed through wrapped functions: every moment of a
step belongs to exactly one component. While it samples, engine, environment server and client work at once; that time
is shared out by the processor time that each of them takes meanwhile. `--model DIR` names weights to start from;
without it the demo's own model is warmed up first, which takes a minute or two. `--json PATH` keeps the raw figures.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.breakdown.processor import add, difference, processor_seconds
from benchmarks.breakdown.spans import Spans
from flows.cli import launch
from flows.reporting.artifacts import ArtifactWatcher, RunArtifacts
from flows.runtime import executor, loops, step_report
from flows.runtime.demo_sources import Sources, build, sources_directory
from flows.runtime.prepare import prepare
from flows.services import engine as inference_service
from storage.ledger import Ledger
from storage.policies.store import Policies
from storage.store import Store, open_store
from tasks.inference.engine.client import MODEL, Engine
from tasks.inference.sampling.attempts import OF_POLICY
from tasks.inference.sampling.rollouts import BatchSampler
from tasks.learner.client import Learner
from tasks.runtime import prefect_task
from tasks.runtime.execute import Parts

STEPS, SKIPPED, WARM_UP_STEPS, SEED = 10, 2, 5, 17
SAMPLING = "sampling"
Seconds = dict[str, float]


class Profile:
    """Follows one run: spans, processor time by process, and what each step reports."""

    def __init__(self) -> None:
        self.spans = Spans()
        self.steps: list[dict[str, Any]] = []
        self.raw: dict[str, float] = {}
        self.engine: tuple[str, str] = ("", "")
        self._sampling: Seconds = defaultdict(float)
        self._last_cpu: Seconds = {}

    def install(self) -> None:
        """Wrap the borders between components."""
        spans = self.spans
        borders: list[tuple[Any, Sequence[str], str]] = [
            (prefect_task.StageTask, ["__call__"], "Prefect tasks"),
            (RunArtifacts, ["publish"], "Prefect artifacts"),
            (executor, ["perform"], "stages"),
            (step_report, ["describe"], "reporting"),
            (loops, ["check_account"], "reporting"),
            (Engine, ["serve", "state", "healthy"], "engine"),
            (inference_service, ["check_serving"], "engine"),
            (Learner, ["train", "probe", "state", "load"], "learner"),
            (Store, ["append", "read"], "store"),
            (Ledger, ["find", "commit", "parts"], "store"),
            (Policies, ["publish", "directory", "scratch"], "store"),
            (Parts, ["stop"], "store"),
        ]
        for owner, names, component in borders:
            for name in names:
                spans.wrap(owner, name, component)
        self._follow_sampling()

    def _follow_sampling(self) -> None:
        inner = BatchSampler.sample

        def sample(sampler: BatchSampler, *tables: Any) -> None:
            policy = sampler.runner.served[OF_POLICY]
            self.engine = policy.url, policy.api_key
            before = processor_seconds()
            with self.spans.span(SAMPLING):
                inner(sampler, *tables)
            add(self._sampling, difference(processor_seconds(), before))

        BatchSampler.sample = sample  # type: ignore[method-assign]

    def watch(self, event: str, facts: Mapping[str, Any]) -> None:
        """Take the figures of a step when it is finished; after the last one, measure the engine alone."""
        if event != "step":
            return
        exclusive, total = self.spans.take()
        cpu = processor_seconds()
        self.steps.append(
            {
                "wall": sum(exclusive.values()),
                "exclusive": exclusive,
                "total": total,
                "stages": dict(facts["seconds"]),
                "cpu": difference(cpu, self._last_cpu),
                "sampling_cpu": dict(self._sampling),
                "num_traces": facts["num_traces"],
                "tokens": facts["tokens"],
                "reward": facts["reward"],
            }
        )
        self._sampling.clear()
        self._last_cpu = cpu

    def measure_engine(self, store: str, run: str) -> None:
        """Let the engine do the last step's generation again, with nobody in front of it."""
        opened = open_store(store)
        entry = next(each for each in reversed(opened.ledger.entries(run=run, stage="rollout")) if not each.part)
        messages = opened.read(entry.slices("messages"), ["sampled", "token_ids"]).to_pylist()
        prompts = [row["token_ids"] for row in messages if not row["sampled"]]
        answers = [len(row["token_ids"]) for row in messages if row["sampled"]]
        num_tokens = round(sum(answers) / len(answers))
        self.raw = raw_engine(*self.engine, prompts, num_tokens)


def raw_engine(url: str, api_key: str, prompts: list[list[int]], num_tokens: int) -> dict[str, float]:
    """Return what the engine does alone with all prompts in one request, `num_tokens` sampled for each; best of 5."""
    body = {"model": MODEL, "prompt": prompts, "max_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
    seconds = []
    with httpx.Client(headers={"Authorization": f"Bearer {api_key}"}, timeout=120, trust_env=False) as client:
        for number in range(5):
            began = time.perf_counter()
            client.post(f"{url}/v1/completions", json={**body, "cache_salt": f"raw {number}"}).raise_for_status()
            seconds.append(time.perf_counter() - began)
    return {"seconds": min(seconds), "sampled_tokens": len(prompts) * num_tokens, "num_prompts": len(prompts)}


def run(store: str, model: str, steps: int, profile: Profile) -> None:
    """Run the demo's reinforcement learning from `model` and follow it."""
    settings = [f"model.path={model}", "evaluation.every=0"]
    config = prepare("train", ["demo"], settings, name="breakdown", store=store, seed=SEED, steps=steps)
    artifacts = ArtifactWatcher(RunArtifacts(config.name, config.store, steps, config.prefect.artifacts), steps)

    def watch(event: str, facts: Mapping[str, Any]) -> None:
        artifacts(event, facts)
        profile.watch(event, facts)
        if event == "step" and facts["step"] + 1 == steps:
            profile.measure_engine(store, config.name)

    launch.run(config, (watch,))


def warmed_up(store: str) -> str:
    """Make and warm up the demo's model; return the directory of its weights."""
    opened = open_store(store)  # before the sources lie there: a store is made in an empty directory
    build(sources := Sources(sources_directory(store)))
    config = prepare(
        "sft", ["sft_demo"], sources.overrides, name="warm-up", store=store, seed=SEED, steps=WARM_UP_STEPS
    )
    return str(opened.policies.directory(launch.run(config)["policy"]["key"]))


def shares(step: Mapping[str, Any]) -> Seconds:
    """Return the step's wall-clock by component, sampling shared out by the processor time of those at work."""
    found: Seconds = defaultdict(float, {name: value for name, value in step["exclusive"].items() if name != SAMPLING})
    cpu = {
        name: value
        for name, value in step["sampling_cpu"].items()
        if name in ("engine", "environment server", "client")
    }
    for name, value in cpu.items():
        found[name] += step["exclusive"].get(SAMPLING, 0.0) * value / sum(cpu.values())
    return found


def medians(rows: Sequence[Mapping[str, float]]) -> Seconds:
    """Return the median of every name over the rows, largest first; an absent name counts as zero."""
    names = {name for row in rows for name in row}
    found = {name: median(row.get(name, 0.0) for row in rows) for name in names}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def table(title: str, rows: Mapping[str, float], whole: float) -> list[str]:
    """Return a markdown table of seconds and shares of `whole`."""
    lines = [f"| {title} | seconds | share |", "|---|---:|---:|"]
    return [*lines, *(f"| {name} | {value:.3f} | {value / whole:.1%} |" for name, value in rows.items()), ""]


def report(profile: Profile) -> str:
    """Return the measured tables as markdown."""
    steps = profile.steps[SKIPPED:]
    walls = [step["wall"] for step in steps]
    wall, raw = median(walls), profile.raw
    parts = medians([shares(step) for step in steps])
    stages = medians(
        [{**step["stages"], "between stages": step["wall"] - sum(step["stages"].values())} for step in steps]
    )
    sampled = raw["sampled_tokens"]
    rollouts = median(step["num_traces"] / step["stages"]["rollout"] for step in steps)
    neither = 1 - (parts["engine"] + parts["learner"]) / sum(parts.values())
    cpu = medians([step["cpu"] for step in steps])
    return "\n".join(
        [
            f"{len(steps)} steps of {steps[0]['num_traces']} rollouts: median {wall:.2f} s "
            f"({min(walls):.2f} to {max(walls):.2f}); neither engine nor learner: {neither:.0%}.",
            "",
            *table("stage", stages, wall),
            *table("component, wall-clock", parts, sum(parts.values())),
            *table("component, processor", cpu, sum(cpu.values())),
            f"Rollouts through the whole path: {rollouts:.0f}/s, {sampled / raw['num_prompts'] * rollouts:,.0f} "
            f"sampled tokens/s. The engine alone, same prompts and lengths: {sampled / raw['seconds']:,.0f} tokens/s, "
            f"{raw['num_prompts'] / raw['seconds']:.0f} answers/s.",
        ]
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="directory of weights to start from")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    chosen = parser.parse_args()
    root = tempfile.mkdtemp(prefix="stagecoach-breakdown-")
    profile = Profile()
    profile.install()  # before the flows are imported, which take some of the functions by name
    try:
        run(f"{root}/store", chosen.model or warmed_up(f"{root}/store"), chosen.steps, profile)
    finally:
        shutil.rmtree(root)
    print(report(profile))
    if chosen.json:
        chosen.json.write_text(json.dumps({"steps": profile.steps, "raw": profile.raw}, indent=1))


if __name__ == "__main__":
    sys.exit(main())

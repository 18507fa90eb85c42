"""describe: a run as plain values, for the command show: its state, its steps and its scores."""

import re
from typing import Any

from configs.run import RunConfig
from flows.queries.metrics import StepNumbers, numbers
from flows.queries.notes import notes_of
from flows.queries.run_state import count_lost_services, deciding_event, recorded_warnings, state_of
from flows.queries.runs import headline_settings
from flows.queries.scores import comparisons, mixed_policies, recorded_evaluations
from flows.queries.store_reader import StoreReader
from flows.reporting.messages import rollout_counts
from storage.store import Store
from tasks.metrics.figures import ALL, full_name

FIGURES = {
    "reward": (ALL, "reward/mean"),
    "length": (ALL, "num_output_tokens"),
    "kept": ("", "kept"),
    **{name: ("", f"updates/{name}/mean") for name in ("loss", "grad_norm", "mismatch_kl", "entropy")},
}
"""The scope and the name of the metric that each figure of a step is."""
NAMES = [name for _, name in FIGURES.values()]
SHOWN = rf"^accounting/|^batch/(num_traces|truncated_ratio)$|^({'|'.join(map(re.escape, NAMES))})$"
"""The metrics that are read: a step has a hundred, and a long run is shown by a few."""


def describe(store: Store, run: str, config: RunConfig) -> dict[str, Any]:
    """Return a run as plain values: its state, its steps with their metrics, scores and notes."""
    events = store.runs.events(run)
    scored = [evaluation.scores_in(store, config) for evaluation in recorded_evaluations(store, run, config)]
    steps, mixed = list(map(_step, numbers(StoreReader(store), run, SHOWN))), mixed_policies(store, run)
    return {
        "run": run,
        "kind": config.kind,
        **headline_settings(events[-1].config),
        **state_of(deciding_event(events)),
        "lost_services": count_lost_services(store.runs.lost_services(run)),
        "store": store.root.address,
        "num_steps": config.steps,
        "steps": steps,
        "warnings": recorded_warnings(store.runs, run),
        "evaluations": [evaluation.described for evaluation in scored],
        "comparisons": [] if mixed else comparisons(scored),
        "mixed_policies": mixed,
        "notes": [{**note, "at": note["at"].isoformat()} for note in notes_of(store, run, "")],
    }


def _step(step: StepNumbers) -> dict[str, Any]:
    tokens = (value for (_, name), value in step.values.items() if name.startswith("tokens/stage/"))
    return {
        "step": step.step,
        "finished": step.work.finished,
        **{field: step.values.get(metric) for field, metric in FIGURES.items()},
        **rollout_counts(step.values),
        "tokens": int(max(tokens, default=0)),
        "metrics": {full_name(*name): value for name, value in step.values.items()},
    }

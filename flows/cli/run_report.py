"""describe: a run as plain values, for the command show: its state, its steps and its scores."""

from typing import Any

import polars as pl

from configs.run import RunConfig
from flows.queries.metrics import read_metrics
from flows.queries.notes import notes_of
from flows.queries.run_state import count_lost_services, deciding_event, state_of
from flows.queries.runs import headline_settings
from flows.queries.scores import comparisons, mixed_policies, recorded_evaluations
from flows.queries.step_history import RecordedStep, step_history
from flows.reporting import usual_range
from flows.reporting.messages import rollout_counts
from storage.read.frames import Frames
from storage.store import Store
from tasks.metrics.figures import ALL, Values, full_name
from tasks.runtime.stage import ref_of, rows_of

FIGURES = {
    "reward": (ALL, "reward/mean"),
    "length": (ALL, "num_output_tokens"),
    "kept": ("", "kept"),
    **{name: ("", f"updates/{name}/mean") for name in ("loss", "grad_norm", "mismatch_kl", "entropy")},
}
"""The scope and the name of the metric that each figure of a step is."""
NAMES = [name for _, name in (*FIGURES.values(), *usual_range.FIGURES.values())]
SHOWN = pl.col("name").is_in(NAMES) | pl.col("name").str.contains("^accounting/|^batch/(num_traces|truncated_ratio)$")
"""The metrics that are read: a step has a hundred, and a long run is shown by a few."""


def describe(store: Store, run: str, config: RunConfig) -> dict[str, Any]:
    """Return a run as plain values: its state, steps stage by stage, scores and notes."""
    events = store.runs.events(run)
    scored = [evaluation.scores_in(store, config) for evaluation in recorded_evaluations(store, run, config)]
    steps, mixed = _steps(store, run), mixed_policies(store, run)
    return {
        "run": run,
        "kind": config.kind,
        **headline_settings(events[-1].config),
        **state_of(deciding_event(events)),
        "lost_services": count_lost_services(store.runs.lost_services(run)),
        "store": store.root.address,
        "num_steps": config.steps,
        "steps": steps,
        "outside_usual_range": usual_range.range_exits(steps),
        "evaluations": [evaluation.described for evaluation in scored],
        "comparisons": [] if mixed else comparisons(scored),
        "mixed_policies": mixed,
        "notes": [{**note, "at": note["at"].isoformat()} for note in notes_of(store, run, "")],
    }


def _steps(store: Store, run: str) -> list[dict[str, Any]]:
    """Return the steps of a run; of an unfinished one there are no metrics."""
    # Of a removed run the training alone may have stayed, because others need it: that is no step to show.
    steps = [step for step in step_history(store, run).steps.values() if step.by_stage.keys() != {"training"}]
    values = read_metrics(Frames(store), [step.metrics for step in steps if step.metrics], where=SHOWN)
    return [_step(step, values[step.metrics.key] if step.metrics else {}) for step in steps]


def _step(step: RecordedStep, values: Values) -> dict[str, Any]:
    refs = {stage: [ref_of(work.entry, computed=False) for work in works] for stage, works in step.by_stage.items()}
    tokens = {stage: sum(ref.tokens for ref in stage_refs) for stage, stage_refs in refs.items()}
    return {
        "step": step.step,
        "finished": step.finished,
        **{field: values.get(metric) for field, metric in FIGURES.items()},
        **rollout_counts(values),
        "metrics": {full_name(*name): value for name, value in values.items()},
        "seconds": {stage: sum(ref.seconds for ref in stage_refs) for stage, stage_refs in refs.items()},
        "tokens": {stage: count for stage, count in tokens.items() if count},
        "rows": {stage: rows_of(stage_refs)[stage] for stage, stage_refs in refs.items()},
    }

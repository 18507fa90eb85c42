"""The command show: a run at a glance, and the stages that a change to its config would run again."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any

import polars as pl
from rich.text import Text

from configs.run import RunConfig
from configs.store import default_store
from flows.cli.arguments import Count, Json, Name, RunItems, StoreOption, one_run, option, run_and_step, split_items
from flows.queries.compare_summary import ranges
from flows.queries.metrics import read_metrics
from flows.queries.notes import note_line, notes_of
from flows.queries.request import NotThere
from flows.queries.run_state import count_lost_services, deciding_event, look_of, process_gone
from flows.queries.runs import headline_settings
from flows.queries.scores import comparisons, mixed_policies, recorded_evaluations
from flows.queries.step_history import RecordedStep, step_history
from flows.queries.store_reader import recorded_run
from flows.reporting import usual_range
from flows.reporting.formats import (
    LONGEST_LINE,
    Grid,
    before_after,
    compact_number,
    console,
    count,
    environment_title,
    grid,
    one_line,
    paint,
    seconds,
    sparkline,
    visible,
    with_interval,
)
from flows.reporting.messages import LOSSES, count_losses, losses_message, rollout_counts
from storage.read.frames import Frames, existing_store
from storage.store import Store
from tasks.metrics.figures import ALL, Values, full_name, mean
from tasks.runtime.stage import ref_of, rows_of
from tasks.stages import STEP_STAGES

FIGURES = {
    "reward": (ALL, "reward/mean"),
    "length": (ALL, "num_output_tokens"),
    "kept": ("", "kept"),
    **{name: ("", f"updates/{name}/mean") for name in ("loss", "grad_norm", "mismatch_kl", "entropy")},
}
"""The scope and the name of the metric that each figure of a step is."""
STREAM = [
    f"stream/{name}" for name in ("seconds", "learner_waited", "engine_idle", "fullness", "stale", "token_age/mean")
]
"""Metrics of steps that took their rollouts from a stream."""
SHOWN = {name for _, name in (*FIGURES.values(), *usual_range.FIGURES.values())} | {*STREAM}
OF_LOSSES = pl.col("name").str.contains("^accounting/|^batch/(num_traces|truncated_ratio)$")
"""The metrics that `rollout_counts` reads."""
OFTEN = 0.1
"""Share of the time from which on a wait is worth a change of settings."""
FULL = 0.9
"""Share of `rollout.max_in_flight` from which on that is what holds rollouts back."""
LONGEST_CURVE = 48
CURVES = {"reward": "reward", "length": "length", "entropy": "entropy", "gap (KL)": "mismatch_kl", "loss": "loss"}
"""Figures of a step that are drawn, by the name of the line; the gap is the one between engine and learner."""


def show(
    *items: RunItems,
    name: Name = "",
    last: Annotated[Count, option("number of last steps to print")] = 10,
    timing: Annotated[bool, option("also the seconds of each stage")] = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print a run: all steps as curves, the last ones, or the step of RUN:STEP, as rows.

    Raises RunUnknown, NotThere for an unknown step, LayoutError without a store; none is made.
    """
    runs, overrides = split_items(items)
    run, step = run_and_step(one_run([name, *runs]))
    root = existing_store(store or default_store())
    report = describe(root, *recorded_run(root, run), overrides)
    steps = [entry["step"] for entry in report["steps"]]
    if step is not None and step not in steps:
        raise NotThere(f"run {report['run']!r} has no step {step}; it has {ranges(steps) or 'none yet'}")
    if as_json:
        print(json.dumps(report if step is None else report["steps"][steps.index(step)], sort_keys=True))
        return 0
    printed = slice(-last, None) if step is None else slice(steps.index(step), steps.index(step) + 1)
    out = console()
    for part in _parts(report, printed, timing):
        if part:
            out.print(one_line(part, LONGEST_LINE) if isinstance(part, str) else part)
    return 0


def describe(store: Store, run: str, config: RunConfig, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return a run as plain values: its state, steps stage by stage, scores, and what `overrides` would run again."""
    events, lost = store.runs.events(run), store.runs.lost_services(run)
    scored = [evaluation.scores_in(store, config) for evaluation in recorded_evaluations(store, run, config)]
    steps = _steps(store, run)
    described: dict[str, Any] = {
        "run": run,
        "kind": config.kind,
        **headline_settings(events[-1].config),
        "state": (deciding := deciding_event(events)).event,
        "message": deciding.message,
        "process_gone": process_gone(deciding),
        "lost_services": count_lost_services(lost),
        "last_lost_service": lost[-1].message if lost else "",
        "store": store.root.address,
        "num_steps": config.steps,
        "steps": steps,
        "outside_usual_range": usual_range.range_exits(steps),
        "evaluations": [evaluation.described for evaluation in scored],
        "comparisons": [] if (mixed := mixed_policies(store, run)) else comparisons(scored),
        "mixed_policies": mixed,
        "notes": [{**note, "at": note["at"].isoformat()} for note in notes_of(store, run, "")],
    }
    if overrides:
        described["change"] = changes(store, run, config, overrides)
    return described


def changes(store: Store, run: str, config: RunConfig, overrides: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return, by stage, how many pieces of work the run would find and how many it would compute with `overrides`."""
    # Whoever plans a run imports all that runs need; who looks at one does not.
    from configs.load import load
    from flows.replays.loop import plan_run
    from flows.runtime.machine_facts import versions
    from flows.runtime.resolve_run import source_of
    from tasks.runtime.run_context import RunContext

    changed = load((), overrides, base=config.model_dump(mode="json"))
    context = RunContext(store, run, changed, versions(changed))
    # The versions are those of today: what another release would compute again is said, too.
    counts: dict[str, Counter[str]] = {}
    for piece in plan_run(context, source_of(changed)):
        counts.setdefault(piece.stage, Counter())["computed" if piece.computed else "found"] += 1
    return {stage: dict(count) for stage, count in counts.items()}


def _steps(store: Store, run: str) -> list[dict[str, Any]]:
    """Return the steps of a run; of an unfinished one there are no metrics."""
    # Of a removed run the training alone may have stayed, because others need it: that is no step to show.
    steps = [step for step in step_history(store, run).steps.values() if step.by_stage.keys() != {"training"}]
    # The metrics of all steps are read in one look: a read for each would take seconds in a store of others' runs.
    works = [step.metrics for step in steps if step.metrics]
    values = read_metrics(Frames(store), works, where=pl.col("name").is_in(SHOWN) | OF_LOSSES)
    return [_step(run, step, values[step.metrics.key] if step.metrics else {}) for step in steps]


def _step(run: str, step: RecordedStep, values: Values) -> dict[str, Any]:
    stages = step.by_stage
    refs = {stage: [ref_of(work.entry, computed=False) for work in works] for stage, works in stages.items()}
    tokens = {stage: sum(ref.tokens for ref in stage_refs) for stage, stage_refs in refs.items()}
    # A ledger row names slices by the run that computed them.
    shared = (stage for stage, works in stages.items() if any(s.run != run for work in works for s in work.slices))
    return {
        "step": step.step,
        "finished": step.finished,
        **{field: values.get(metric) for field, metric in FIGURES.items()},
        **rollout_counts(values),
        "metrics": {full_name(*name): value for name, value in values.items()},
        "stream": {name.partition("/")[2]: values["", name] for name in STREAM if ("", name) in values},
        "seconds": {stage: sum(ref.seconds for ref in stage_refs) for stage, stage_refs in refs.items()},
        "tokens": {stage: count for stage, count in tokens.items() if count},
        "rows": {stage: rows_of(stage_refs)[stage] for stage, stage_refs in refs.items()},
        "shared": sorted(shared),
    }


def _parts(report: dict[str, Any], printed: slice, timing: bool) -> Iterator[str | Text | Grid]:
    """Yield the lines and tables of a run."""
    state, badge = report["state"], look_of(report["state"])
    if report["process_gone"]:
        state, badge = f"{state}; its process is gone", "warn"
    steps, all_steps = report["steps"][printed], report["steps"]
    head = Text(visible(f"{report['kind']} {report['run']}: "))
    yield head + paint(state, badge) + f", {len(all_steps)}/{report['num_steps']} steps"
    yield report["message"]
    for name in ("model", "environments", "algorithms"):
        if value := report[name]:
            yield f"{name:<13} {value if isinstance(value, str) else ', '.join(value)}"
    if total := sum(sum(step["seconds"].values()) for step in all_steps):
        tokens = sum(max(step["tokens"].values(), default=0) for step in all_steps)
        yield f"{'total':<13} {seconds(total)} of work in steps, {count(tokens)} tokens"
    if report["lost_services"]:
        counts = ", ".join(f"{service} {number}" for service, number in report["lost_services"].items())
        yield f"services lost: {counts}; the last one: {report['last_lost_service']}"
    yield from map(note_line, report["notes"])
    yield losses_message(all_steps)
    yield usual_range.describe_exits(all_steps)
    yield from _curves(report)
    if verdict := stream_verdict([step["stream"] for step in all_steps]):
        yield f"{'stream':<13} {verdict}"
    yield _table(steps)
    if timing:
        yield "seconds of each stage (* shared with another run):"
        yield _times(steps)
    if len(steps) < len(all_steps):
        yield f"{len(steps)} of {len(all_steps)} steps; --last N shows more, --timing the seconds of stages"
    versions = sorted({evaluation["version"] for evaluation in report["evaluations"]})
    yield from _scores([evaluation for evaluation in report["evaluations"] if evaluation["version"] == versions[-1]])
    if versions[1:]:
        yield f"{len(versions)} policies were scored: `stagecoach evals {report['run']}` lists all"
    yield report["mixed_policies"]
    if report["comparisons"]:
        yield before_after(report["comparisons"])
    yield f"tables: {report['store']}/tables"
    for stage, works in report.get("change", {}).items():
        yield f"{stage:<21} {works.get('computed', 0):>5} to compute, {works.get('found', 0):>5} cached"


def _curves(report: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each figure that at least two steps, or two scored policies, have."""
    by_version: dict[int, list[float]] = {}
    for evaluation in sorted(report["evaluations"], key=itemgetter("version")):  # perhaps of several sets
        averages = [score["average"] for score in evaluation["scores"] if score["average"] is not None]
        by_version.setdefault(evaluation["version"], []).extend(averages)
    held_out = [mean(averages) if averages else None for averages in by_version.values()]
    series = {name: [step[field] for step in report["steps"]] for name, field in CURVES.items()}
    for name, values in {"reward": series.pop("reward"), "held out": held_out, **series}.items():
        numbers = [value for value in values if value is not None]
        if len(numbers) > 1:
            begin = f"{name:<9} {compact_number(numbers[0]):>9} to {compact_number(numbers[-1]):<9} "
            yield begin + sparkline(values, max(1, min(LONGEST_CURVE, console().width - len(begin))))


def stream_verdict(steps: Sequence[Mapping[str, float]]) -> str:
    """Say who waited in a run whose steps took their rollouts from a stream, and what to change; empty for others.

    Each step has its metrics `stream/NAME` by name; means are over time.
    """
    measured = [step for step in steps if step.get("seconds")]
    if not measured:
        return ""
    total = sum(step["seconds"] for step in measured)
    names = ("learner_waited", "engine_idle", "fullness")
    waited, idle, full = (sum(step["seconds"] * step[name] for step in measured) / total for name in names)
    ages = [step["token_age/mean"] for step in measured if "token_age/mean" in step]
    age = f", tokens were {mean(ages):.1f} steps old" if ages else ""
    summary = (
        f"the learner waited {waited:.0%} of the time; the engine was idle {idle:.0%} of it, on average {full:.0%} full"
    )
    summary += age
    stale = sum(step["seconds"] * step.get("stale", 0.0) for step in measured) / total
    if stale:
        summary += f", {stale:.0%} of the groups came to be too old"
    advice = [
        (stale >= OFTEN, "raise rollout.max_off_policy_steps, or lower assignment.oversampling where it is above 1"),
        (
            waited >= OFTEN and full >= FULL,
            "raise rollout.max_in_flight if the engine has room, or give it more of the machine",
        ),
        (waited >= OFTEN, "raise rollout.max_off_policy_steps, so that more groups may be begun"),
        (idle >= OFTEN, "the learner is what the run waits for; fewer rollout.max_off_policy_steps may do"),
        (True, "neither has to be changed"),
    ]
    return f"{summary}: {next(text for holds, text in advice if holds)}"


def _table(steps: Sequence[dict[str, Any]]) -> Grid:
    losses = [{outcome: counter.total() for outcome, counter in count_losses([step]).items()} for step in steps]
    lost = [outcome for outcome in LOSSES if any(counts[outcome] for counts in losses)]
    headings = ("step", "reward", *(LOSSES[outcome] for outcome in lost), "kept", "loss", "grad norm", "KL", "tokens")
    rows = []
    for step, counts in zip(steps, losses, strict=True):
        figures = [compact_number(step[name]) for name in ("reward", "kept", "loss", "grad_norm", "mismatch_kl")]
        figures[1:1] = [f"{counts[outcome]:,}" for outcome in lost]
        rows.append((step["step"], *figures, max(step["tokens"].values(), default=0)))
    return grid(headings, rows, left=())


def _times(steps: Sequence[dict[str, Any]]) -> Grid:
    stages = [stage for stage in STEP_STAGES if any(stage in step["seconds"] for step in steps)]
    return grid(("step", *stages), ((step["step"], *(_seconds(step, s) for s in stages)) for step in steps), left=())


def _scores(evaluations: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows = ((row["version"], row["set"], score) for row in evaluations for score in row["scores"])
    for version, set_name, score in rows:
        passes = "".join(f", pass@{entry['k']} {with_interval(entry['estimate'], entry)}" for entry in score["pass_at"])
        errors = "".join(f", {count} {kind}" for kind, count in score["errors"].items())
        attempts = f"{score['num_attempts']} attempts at {score['num_examples']} examples{errors}"
        average = with_interval(score["average"], score)
        where = environment_title(set_name, score["environment"])
        yield f"policy {version} on held-out {where}: average {average}{passes} ({attempts})"


def _seconds(step: dict[str, Any], stage: str) -> str:
    shared = "*" if stage in step["shared"] else ""
    return f"{step['seconds'][stage]:.2f}{shared}" if stage in step["seconds"] else "-"

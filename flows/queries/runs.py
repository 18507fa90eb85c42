"""All runs of a store, or one: its state, its config, its origin, its figures, its ledger and its events."""

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

import polars as pl

from configs.errors import ConfigError
from configs.store_paths import STORE
from flows.queries.charts import last_value
from flows.queries.compare import compared_configs
from flows.queries.metrics import written_metrics
from flows.queries.notes import notes_of
from flows.queries.row_lineage import policy_version
from flows.queries.run_state import count_lost_services, deciding_event, is_going, seconds_at_work, state_of
from flows.queries.scores import held_out
from flows.queries.step_history import RecordedStep
from flows.queries.store_reader import StoreReader, flat
from tasks.metrics.figures import ALL, Values, mean

RUNS: dict[str, Any] = {
    **dict.fromkeys(("run", "parent", "kind", "state", "look", "message", "model", "policy"), pl.String),
    **dict.fromkeys(("steps_done", "steps_planned", "tokens_sampled", "tokens_trained", "bytes"), pl.Int64),
    **dict.fromkeys(("last_reward", "last_loss", "held_out", "seconds"), pl.Float64),
    **dict.fromkeys(("rewards", "losses"), pl.List(pl.Float64)),
    **dict.fromkeys(("tags", "notes", "algorithms", "environments"), pl.List(pl.String)),
    **dict.fromkeys(("started_at", "changed_at"), pl.Datetime("us", "UTC")),
}
"""One row for each run. `parent` is the run that it branches off. `rewards` and `losses` are means by step, null where
there is none; `held_out` is the mean of the last policy's averages. `policy` names the model as RUN:VERSION where a run
of the store made it. `tags` and `notes` are those on the run itself. Sampled are the tokens that were generated for the
run's finished steps, trained those that had a weight; null where no step has its metrics. `bytes` are those of
the files of the run's own rows."""


def runs(reader: StoreReader) -> pl.DataFrame:
    """Return all runs, as in RUNS, the newest last. Tables are looked at once for all runs together."""
    names = reader.store.runs.names()
    by_run = {name: reader.history(name).sampled_steps for name in names}
    written_metrics(reader, [step for steps in by_run.values() for step in steps])
    return pl.DataFrame([_run(reader, name, steps, names) for name, steps in by_run.items()], schema=RUNS)


def _run(reader: StoreReader, name: str, steps: Sequence[RecordedStep], known: Collection[str]) -> dict[str, Any]:
    metrics, notes = written_metrics(reader, steps), notes_of(reader.store, name, "")
    rewards = [values.get((ALL, "reward/mean")) for values in metrics]
    losses = [values.get(("", "updates/loss/mean")) for values in metrics]
    return {
        **_summary(reader, name, steps, known),
        **{"rewards": rewards, "last_reward": last_value(rewards), "losses": losses, "last_loss": last_value(losses)},
        "held_out": _held_out(reader, name),
        "tags": list(dict.fromkeys(tag for note in notes for tag in note["tags"])),
        "notes": [note["text"] for note in notes if note["text"]],
        **tokens_of(metrics),
    }


def _summary(reader: StoreReader, name: str, steps: Sequence[RecordedStep], known: Collection[str]) -> dict[str, Any]:
    """Return what the list of runs and the page of one have in common: state, origin, settings, size and times."""
    events = reader.store.runs.events(name)
    last, own = events[-1], [work for work in reader.frames(name).graph.works.values() if work.computed_by == name]
    last_work = max((work.entry.finished_at for work in own), default=None)
    planned = last.config.get("steps")
    return {
        **{"run": name, "kind": last.kind, "parent": last.parent_run if last.parent_run in known else None},
        **state_of(deciding_event(events)),
        "steps_done": steps_done(steps, last.config),
        "steps_planned": planned if isinstance(planned, int) else None,
        **headline_settings(last.config),
        "policy": policy_of(reader, last.config),
        "bytes": sum(file.size for work in own for piece in work.slices for file in piece.files),
        "seconds": seconds_at_work(events, last_work),
        "started_at": events[0].at,
        "changed_at": max(filter(None, (last.at, last_work))),
    }


def steps_done(steps: Sequence[RecordedStep], config: Mapping[str, Any]) -> int:
    """Return how many steps are through: trained, or as far as a replay that trains nothing goes."""
    until = section(config, "replay").get("until", "training") if config.get("kind") == "replay" else "training"
    return sum(any(work.stage == until and work.finished for work in step.works) for step in steps)


def _held_out(reader: StoreReader, name: str) -> float | None:
    try:
        evaluations = held_out(reader, name)
    except ConfigError:  # of a version of the program that wrote other configs: the other runs are listed all the same
        return None
    last = max((entry["version"] for entry in evaluations), default=None)
    scores = [score["average"] for entry in evaluations if entry["version"] == last for score in entry["scores"]]
    averages = [average for average in scores if average is not None]
    return mean(averages) if averages else None


def headline_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return model, algorithms and environments of a run; of another version's config those that it has.

    A model inside the store is named by its path below the store.
    """
    listed = config.get("environments")
    environments = [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    usual = section(config, "algorithm").get("type")
    types = [section(entry, "algorithm").get("type", usual) for entry in environments] or [usual]
    algorithms = list(dict.fromkeys(map(str, filter(None, types)))) if config.get("kind") != "sft" else []
    model = section(config, "model").get("path")
    names = [str(entry.get("name")) for entry in environments]
    return {"model": str(model).removeprefix(STORE) if model else None, "algorithms": algorithms, "environments": names}


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a config as it was written; an empty one where there is none."""
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def policy_of(reader: StoreReader, config: Mapping[str, Any]) -> str | None:
    """Return the name RUN:VERSION of the policy that a run starts from; None where no run of the store made it."""
    # Weights of a store lie in a folder that is named by the key of the work that made them.
    key = str(section(config, "model").get("path") or "").rstrip("/").rpartition("/")[2]
    work = reader.graph.works.get(key)
    return f"{work.computed_by}:{policy_version(work)}" if work and work.stage == "training" else None


def tokens_of(metrics: Sequence[Values]) -> dict[str, int | None]:
    """Return the tokens of some steps, given by their metrics: `tokens_sampled` and `tokens_trained`, as in RUNS."""
    names = {"tokens_sampled": (ALL, "rollout/output_tokens"), "tokens_trained": ("", "updates/weighted_tokens")}
    known = any(metrics) or not metrics
    return {
        field: int(sum(values.get(name, 0) for values in metrics)) if known else None for field, name in names.items()
    }


def overview(reader: StoreReader, run: str, steps: Sequence[RecordedStep]) -> dict[str, Any]:
    """Return a run as plain values: state, kind, config, parent and what differs from it. Raises NotThere."""
    config, events = reader.config(run), reader.store.runs.events(run)
    known = reader.store.runs.names()
    summary = _summary(reader, run, steps, known)
    parent = summary["parent"]
    return {
        **summary,
        "going": is_going(deciding_event(events)),
        "lost_services": count_lost_services(reader.store.runs.lost_services(run)),
        "host": events[-1].host,
        "forks": [name for name in known if reader.store.runs.events(name)[-1].parent_run == run],
        "differences": compared_configs(reader.config(parent), config) if parent else [],
        "config": config.model_dump(mode="json"),
        "changed_settings": dict(flat(config.model_dump(mode="json", exclude_defaults=True))),
        "notes": notes_of(reader.store, run, ""),
    }


def waiting_gate(reader: StoreReader, run: str) -> int | None:
    """Return the step of a run that is packed while its gate asks a person; None where nobody is asked."""
    gate = section(reader.store.runs.events(run)[-1].config, "gate")
    for step in reader.history(run).sampled_steps:
        last = step.lineages[-1]
        if last.updates is None:  # the first that is not trained: those after it are not asked about yet
            is_due = gate.get("type") == "pause" and step.step % gate.get("every", 1) == 0
            return step.step if is_due and last.batches and not last.decision else None
    return None


def events(reader: StoreReader, run: str) -> list[dict[str, Any]]:
    """Return the events of a run, those of its services among them, as plain values: event, at, step, message.

    Raises NotThere.
    """
    reader.frames(run)
    names, runs = ("event", "at", "step", "message"), reader.store.runs
    found = sorted([*runs.events(run), *runs.service_events(run)], key=attrgetter("at"))
    return [{name: getattr(each, name) for name in names} for each in found]

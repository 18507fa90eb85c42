"""All runs of a store, or one: its state, its config, its origin, and what it came to."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any

import polars as pl

from configs.errors import ConfigError
from configs.run import RunConfig
from flows.queries.charts import last_value
from flows.queries.compare import compared_configs
from flows.queries.metrics import written_metrics
from flows.queries.notes import notes_of
from flows.queries.row_lineage import policy_version
from flows.queries.run_state import count_lost_services, deciding_event, is_going, seconds_at_work, state_of
from flows.queries.scores import held_out
from flows.queries.step_history import RecordedStep
from flows.queries.store_reader import StoreReader, flat
from storage.records import Event
from tasks.metrics.figures import ALL, Values, mean

RUNS: dict[str, Any] = {
    "run": pl.String,
    "parent": pl.String,
    "kind": pl.String,
    "state": pl.String,
    "look": pl.String,
    "message": pl.String,
    "steps_done": pl.Int64,
    "steps_planned": pl.Int64,
    "rewards": pl.List(pl.Float64),
    "last_reward": pl.Float64,
    "losses": pl.List(pl.Float64),
    "last_loss": pl.Float64,
    "held_out": pl.Float64,
    "model": pl.String,
    "policy": pl.String,
    "tags": pl.List(pl.String),
    "notes": pl.List(pl.String),
    "algorithms": pl.List(pl.String),
    "environments": pl.List(pl.String),
    "tokens_sampled": pl.Int64,
    "tokens_trained": pl.Int64,
    "bytes": pl.Int64,
    "seconds": pl.Float64,
    "started_at": pl.Datetime("us", "UTC"),
    "changed_at": pl.Datetime("us", "UTC"),
}
"""One row for each run. `parent` is the run it branches off, or the one most of whose rollouts it uses. `rewards` and
`losses` are means by step, null where there is none; `held_out` is the mean of the last policy's averages. `policy`
names the model as RUN:VERSION where a run of the store made it. `tags` and `notes` are those on the run itself.
Sampled are the tokens that were generated for the
run's finished steps, trained those that had a weight; null where no step has its metrics. `bytes` are those of
the files of the run's own rows."""


def runs(reader: StoreReader) -> pl.DataFrame:
    """Return all runs, as in RUNS, the newest last. Tables are looked at once for all runs together."""
    names = reader.store.runs.names()
    by_run = {name: reader.history(name).sampled_steps for name in names}
    written_metrics(reader, [step for own in by_run.values() for step in own])
    return pl.DataFrame([_run(reader, name, by_run) for name in names], schema=RUNS)


def _run(reader: StoreReader, name: str, by_run: Mapping[str, Sequence[RecordedStep]]) -> dict[str, Any]:
    metrics, notes = written_metrics(reader, by_run[name]), notes_of(reader.store, name, "")
    rewards = [values.get((ALL, "reward/mean")) for values in metrics]
    losses = [values.get(("", "updates/loss/mean")) for values in metrics]
    return {
        **_summary(reader, name, by_run[name], by_run),
        "rewards": rewards,
        "last_reward": last_value(rewards),
        "losses": losses,
        "last_loss": last_value(losses),
        "held_out": _held_out(reader, name),
        "tags": list(dict.fromkeys(tag for note in notes for tag in note["tags"])),
        "notes": [note["text"] for note in notes if note["text"]],
        **tokens_of(metrics),
    }


def _summary(reader: StoreReader, name: str, steps: Sequence[RecordedStep], known: Container[str]) -> dict[str, Any]:
    """Return what the list of runs and the page of one have in common: state, origin, settings, size and times."""
    events = reader.store.runs.events(name)
    config, works = events[-1].config, reader.frames(name).graph.works.values()
    own = [work for work in works if work.computed_by == name]
    last_work = max((work.entry.finished_at for work in own), default=None)
    return {
        "run": name,
        "parent": parent_of(name, events[-1], steps, known),
        "kind": events[-1].kind,
        **state_of(deciding_event(events)),
        "steps_done": steps_done(steps, config),
        "steps_planned": planned if isinstance(planned := config.get("steps"), int) else None,
        **headline_settings(config),
        "policy": policy_of(reader, config),
        "bytes": sum(file.size for work in own for piece in work.slices for file in piece.files),
        "seconds": seconds_at_work(events, last_work),
        "started_at": events[0].at,
        "changed_at": max(filter(None, (events[-1].at, last_work))),
    }


def parent_of(name: str, event: Event, steps: Sequence[RecordedStep], known: Container[str]) -> str | None:
    """Return the run that a run branches off: as it says, or the one that computed most of what it shares.

    `known` are the runs that the store has; of others there is nothing to show.
    """
    if event.parent_run:
        return event.parent_run if event.parent_run in known else None
    # Rollouts alone: they are what costs, and what a fork is made to share.
    others = Counter(work.computed_by for each in steps for work in each.traces if work.computed_by != name)
    return next((other for other, _ in others.most_common() if other in known), None)


def steps_done(steps: Sequence[RecordedStep], config: Mapping[str, Any]) -> int:
    """Return how many steps are through: trained, or as far as a replay that trains nothing goes."""
    until = section(config, "replay").get("until", "training") if config.get("kind") == "replay" else "training"
    return sum(any(work.stage == until and work.finished for work in each.works) for each in steps)


def _held_out(reader: StoreReader, name: str) -> float | None:
    try:
        found = held_out(reader, name)
    except ConfigError:  # of a version of the program that wrote other configs: the other runs are listed all the same
        return None
    last = max((each["version"] for each in found), default=None)
    averages = [
        score["average"]
        for each in found
        if each["version"] == last
        for score in each["scores"]
        if score["average"] is not None
    ]
    return mean(averages) if averages else None


def headline_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the config of a run says it is about; a run of another version's config says what it can."""
    given = config.get("environments")
    environments = [each for each in given if isinstance(each, Mapping)] if isinstance(given, Sequence) else []
    own = [section(each, "algorithm").get("type") for each in environments]
    types = own if environments and all(own) else [section(config, "algorithm").get("type"), *own]
    model = section(config, "model").get("path")
    return {
        "model": str(model) if model else None,
        "algorithms": list(dict.fromkeys(str(each) for each in types if each)) if config.get("kind") != "sft" else [],
        "environments": [str(each.get("name")) for each in environments],
    }


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a config as it was written; an empty one where there is none."""
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def policy_of(reader: StoreReader, config: Mapping[str, Any]) -> str | None:
    """Return the name RUN:VERSION of the policy that a run starts from; None where no run of the store made it."""
    path = str(section(config, "model").get("path") or "")
    # Weights of a store lie in a folder that is named by the key of the work that made them.
    work = reader.graph.works.get(path.rstrip("/").rpartition("/")[2])
    made = work is not None and work.stage == "training"
    return f"{work.computed_by}:{policy_version(work)}" if work is not None and made else None


def tokens_of(metrics: Sequence[Values]) -> dict[str, int | None]:
    """Return the tokens of some steps, given by their metrics: `tokens_sampled` and `tokens_trained`, as in RUNS."""
    written = [each for each in metrics if each]
    sampled = [each.get((ALL, "rollout/output_tokens"), 0) for each in written]
    trained = [each.get(("", "updates/weighted_tokens"), 0) for each in written]
    known = written or not metrics
    return {
        "tokens_sampled": int(sum(sampled)) if known else None,
        "tokens_trained": int(sum(trained)) if known else None,
    }


def overview(reader: StoreReader, run: str, steps: list[RecordedStep]) -> dict[str, Any]:
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
        "flow_run": events[-1].flow_run,
        **_settings(config),
        "forks": [name for name in known if branched_off(reader).get(name) == run],
        "differences": compared_configs(reader.config(parent), config) if parent else [],
        "config": config.model_dump(mode="json"),
        "changed_settings": dict(flat(config.model_dump(mode="json", exclude_defaults=True))),
        "notes": notes_of(reader.store, run, ""),
    }


def _settings(config: RunConfig) -> dict[str, Any]:
    sampled = config.kind != "sft"
    return {
        "seed": config.seed,
        "loss": config.training.loss.type if sampled else None,
        "learning_rate": config.training.learning_rate,
        "groups_per_step": config.assignment.groups_per_step if sampled else None,
        "group_size": config.assignment.group_size if sampled else None,
        "replayed": {"run": config.replay.run, "from": config.replay.from_stage, "until": config.replay.until}
        if config.kind == "replay"
        else None,
    }


def branched_off(reader: StoreReader) -> dict[str, str | None]:
    """Return the run that each run says it branched off, if any."""
    # By the mark, for any commit may be an event of a run.
    runs = reader.store.runs
    return reader.cache.once(
        ("branched off", reader.mark), lambda: {name: runs.events(name)[-1].parent_run for name in runs.names()}
    )

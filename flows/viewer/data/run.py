"""One run at a glance: its state, what it was told to do, where it came from and how much it holds."""

from typing import Any

from configs.run import RunConfig
from flows.queries.compare import compared_configs
from flows.queries.step_history import RecordedStep
from flows.queries.store_reader import Library
from flows.viewer.data.run_states import is_going, seconds_at_work, state_of
from flows.viewer.data.runs import chosen, parent_of, policy_of, steps_done


def overview(library: Library, run: str, steps: list[RecordedStep]) -> dict[str, Any]:
    """Return a run as plain values: state, kind, config, parent and what differs from it. Raises NotThere."""
    config = library.config(run)
    events = library.store.runs.events(run)
    own = [work for work in library.frames(run).graph.works.values() if work.computed_by == run]
    last_work = max((work.entry.finished_at for work in own), default=None)
    known = library.store.runs.names()
    parent = parent_of(run, events[-1], steps, known)
    return {
        "run": run,
        "kind": config.kind,
        **state_of(events[-1]),
        "going": is_going(events[-1]),
        "steps_done": steps_done(steps, events[-1].config),
        "steps_planned": config.steps,
        "started_at": events[0].at,
        "changed_at": max([events[-1].at, *([last_work] if last_work else [])]),
        "seconds": seconds_at_work(events, last_work),
        "bytes": sum(file.size for work in own for piece in work.slices for file in piece.files),
        "host": events[-1].host,
        "flow_run": events[-1].flow_run,
        **chosen(events[-1].config),
        "policy": policy_of(library, events[-1].config),
        **_settings(config),
        "parent": parent,
        "forks": [name for name in known if branched_off(library).get(name) == run],
        "differences": _differences(library, parent, config),
        "config": config.model_dump(mode="json"),
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


def branched_off(library: Library) -> dict[str, str | None]:
    """Return the run that each run says it branched off, if any."""
    runs = library.store.runs
    return library.kept(
        ("branched off", library.mark), lambda: {name: runs.events(name)[-1].parent_run for name in runs.names()}
    )


def _differences(library: Library, parent: str | None, config: RunConfig) -> list[dict[str, Any]]:
    return compared_configs(library.config(parent), config) if parent else []

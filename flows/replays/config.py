"""The config of a replay: that of the recorded run with the requested settings laid over it, checked."""

from typing import Any

from configs.checks.environments import seat_problems
from configs.errors import ConfigError
from configs.load import load
from configs.replay import ORDER, ReplayConfig, needs_weights, replayed_stages
from configs.resolve import reopen_versions, resolve
from configs.run import RunConfig, content, needs_reference_scores
from configs.store import default_store
from flows.queries.step_history import RecordedStep, StepHistory, step_history, trace_ids
from flows.queries.store_reader import recorded_config
from flows.replays.request import (
    ReplayRequest,
    as_begun,
    first_stage,
    names_weights,
    refuse_removed,
    refuse_unread,
    refuse_what_options_say,
    step_range,
)
from flows.replays.steps import chosen_steps
from flows.runtime.machine_facts import config_versions
from flows.runtime.resolve_run import nothing_started, require_same, whole_weights
from flows.services.environments import grader_digest
from flows.services.teachers import reopened_teachers, teacher_facts
from storage.keys import content_key
from storage.read.frames import existing_store
from storage.read.lineage import Work
from storage.store import Store
from tasks.advantage.stage import STAGE
from tasks.arrays.columns import texts
from tasks.arrays.seats import trained_seats
from tasks.inference.engine.model_info import directory_digest, model_directory


def refuse_lost_state(config: RunConfig, recorded: StepHistory) -> None:
    """Raise ConfigError where a replay would continue from state that was not recorded, or that other settings made.

    A cold start, or a baseline that two settings had a hand in, would look healthy and be wrong.
    """
    replay = config.replay
    if not replay.first_step or STAGE.name not in replayed_stages(replay):
        return
    credits = recorded.credits_before(replay.first_step)
    section = credits.entry.section if credits else {}
    lines = []
    for environment in [environment.name for environment in config.environments] or [""]:
        algorithm = config.algorithm_of(environment)
        credited_by = section.get("algorithms", {}).get(environment, section.get("algorithm"))
        if algorithm.stateful and credited_by != content(algorithm):
            lines.append(
                f"--steps: environment {environment!r} is credited by {algorithm.type}, which goes on from the state "
                f"after step {replay.first_step - 1}, and run {replay.run!r} recorded none under these settings. Begin "
                "at step 0 (without --steps), or choose the settings of the run or an algorithm without state"
            )
    if lines:
        raise ConfigError(lines)


def refuse_missing_seats(store: Store, config: RunConfig, steps: list[RecordedStep]) -> None:
    """Raise ConfigError where recorded rollouts are of one trained seat and the algorithm has a baseline for each.

    Where rollouts are sampled again, the environments are asked for their seats instead.
    """
    again = replayed_stages(config.replay)
    if STAGE.name not in again or "rollout" in again:
        return
    names = {each.name for each in config.environments if not config.algorithm_of(each.name).single_agent}
    seats: dict[str, set[str]] = {name: set() for name in names}
    for work in (work for past in steps for work in past.of("rollout").values()):
        if all(len(played) > 1 for played in seats.values()):
            return
        traces = store.read(work.slices_of("traces"))
        trained = trained_seats(traces.filter(traces["trainable"]), config.seat_rules)
        for name, seat in zip(texts(trained["environment"]), texts(trained["agent"]), strict=True):
            if name in seats:
                seats[name].add(seat)
    if lines := list(seat_problems(config, {name: seats[name] for name in names if seats[name]})):
        raise ConfigError(lines)


def refuse_unfit_state(store: Store, config: RunConfig, recorded: StepHistory) -> None:
    """Raise ConfigError where a replay would go on from state that rollouts in quarantine have gone into.

    Leaving them out of the steps that it goes through would not take them out of what these go on from.
    """
    replay = config.replay
    if not (config.stateful and replay.first_step and STAGE.name in replayed_stages(replay)):
        return
    unfit = {name for each in store.quarantines.all() for name in each.trace_ids}
    for judged in recorded.judged_before(replay.first_step) if unfit else ():
        if found := unfit & _kept_traces(store, judged):
            raise ConfigError(
                f"--steps: the state that step {replay.first_step} goes on from holds {len(found)} rollout(s) of "
                f"step {judged.step} that are in quarantine now, first {min(found)}. Begin at step 0 (without "
                "--steps), which leaves them out of it, or keep them (--no-quarantine)"
            )


def prepare_replay(asked: ReplayRequest) -> RunConfig:
    """Return the resolved config of a new replay, or of the replay of that name, to go on with it.

    Raises ConfigError where the run, a step or a stage is not there, a setting means nothing to the stages done again,
    or the config does not hold together. Nothing is started or written.
    """
    with nothing_started():
        refuse_what_options_say(asked.overrides)
        store = existing_store(asked.store or default_store())
        # A name that is known: the replay goes on, with what it was asked for when it began.
        begun = recorded_config(store, asked.name)
        asked = as_begun(asked, begun)
        source = source_config(store, asked.run, begun)
        recorded = step_history(store, asked.run)
        requested = _requested_config(store, begun, source, recorded, asked)
        refuse_unread(requested, asked.overrides, bool(source.data.path or source.data.runs))
        # Settings are checked before the steps: what is misspelt is the likelier reason that nothing fits.
        steps = chosen_steps(requested.replay, recorded)
        _refuse_lost_scores(requested, steps)
        _require_vocabulary(requested)
        # Which steps are meant is settled now, also where the source goes on meanwhile.
        bounds = {"first_step": steps[0].step, "last_step": steps[-1].step + 1}
        replay = requested.replay.model_copy(update=bounds)
        bounded = requested.model_copy(update={"replay": replay, "steps": len(steps)})
        config = _with_versions(_with_weights(store, _with_name(bounded), steps[0]))
        refuse_lost_state(config, recorded)
        refuse_missing_seats(store, config, steps)
        # One that goes on has its quarantines already: what was found since does not change its rows.
        if asked.quarantine and begun is None:
            refuse_unfit_state(store, config, recorded)
        known = recorded_config(store, config.name)
        if known is not None:
            require_same(known, config)
        return config


def source_config(store: Store, run: str, begun: RunConfig | None = None) -> RunConfig:
    """Return the config of the run to be replayed; raises ConfigError where there is none to be gone through again.

    `begun` is the replay that is to go on, if any.
    """
    config = recorded_config(store, run)
    if config is None:
        raise ConfigError(f"store {store.root.address}: there is no run {run!r}; {store.runs.similar_names(run)}")
    if config.kind == "evaluate":
        raise ConfigError(f"run {run!r} is an evaluation: it has no steps to go through again; replay a training run")
    refuse_removed(store, run, begun)
    return config


def _requested_config(
    store: Store, begun: RunConfig | None, source: RunConfig, recorded: StepHistory, asked: ReplayRequest
) -> RunConfig:
    """Return the recorded config, of a replay that goes on its own, with what was asked for laid over it."""
    # What the source was called, and what it went through again, is its own.
    own = {"kind": "replay", "name": asked.name, "replay": ReplayConfig().model_dump(mode="json")}
    own |= {"store": asked.store or default_store(), "fork": ""}
    changed = load((), asked.overrides, base=(begun or source).model_dump(mode="json") | own)
    first, last = step_range(asked.steps)
    steps = {step: past for step, past in recorded.steps.items() if first <= step and (last is None or step < last)}
    touching, standing = _quarantines(store, steps) if asked.quarantine and begun is None else ((), False)
    begin = first_stage(source, changed, asked, standing)
    if begin == "judging" and not (changed.judges or source.judges):
        raise ConfigError(f"--from judging: run {asked.run!r} has no judges; name one (--set 'judges=[{{name=...}}]')")
    settings: dict[str, Any] = {
        "run": asked.run,
        "from_stage": begin,
        "until": asked.until or "training",
        "first_step": first,
        "last_step": last,
        "policies": asked.policies or "own",
        "regrade": asked.regrade,
        "graders": grader_digest(changed.environments) if asked.regrade else "",
    }
    settings["weights"] = _weights(begun, changed, asked)
    if begun is not None:  # its rows would otherwise be of two kinds
        touching = begun.replay.quarantines
    elif asked.quarantine and begin in ("assignment", "rollout"):  # what is sampled may be found, and be another's
        touching = tuple(sorted(each.quarantine for each in store.quarantines.all()))
    settings["quarantines"] = touching
    # Loaded once more, for the messages about what is misspelt.
    requested = load((), (), base=changed.model_dump(mode="json") | {"replay": settings})
    if not replayed_stages(requested.replay):
        until = requested.replay.until
        raise ConfigError(f"replay: --until {until} comes before --from {begin}; the order is {', '.join(ORDER)}")
    return requested


def _weights(begun: RunConfig | None, changed: RunConfig, asked: ReplayRequest) -> str:
    """Return the digest of the weights to start from where they are not the recorded ones; else empty."""
    if names_weights(asked.overrides):
        return directory_digest(model_directory(changed.model.path))
    return begun.replay.weights if begun is not None else ""


def _quarantines(store: Store, steps: dict[int, RecordedStep]) -> tuple[tuple[str, ...], bool]:
    """Return the ids of the quarantines that name a rollout of these steps, sorted, and whether the recorded filtering
    kept such a rollout."""
    # Most stores have none, and reading the ids of all rollouts takes seconds.
    findings = store.quarantines.all()
    if not findings:
        return (), False
    # Only those that touch these steps count: any other would give the replay another name for nothing.
    named = {trace_id for each in findings for trace_id in each.trace_ids}
    sampled = {
        name
        for past in steps.values()
        for work in past.of("rollout").values()
        for name in trace_ids(store, work.slices_of("traces"))
    }
    filtered = [work for past in steps.values() for work in past.of("filtering").values()]
    kept = {name for work in filtered for name in _kept_traces(store, work)}
    touching = {each.quarantine for each in findings if not sampled.isdisjoint(each.trace_ids)}
    return tuple(sorted(touching)), bool(named & kept)


def _kept_traces(store: Store, filtered: Work) -> set[str]:
    """Return the ids of the traces that filtering kept."""
    verdicts = store.read(filtered.slices_of("verdicts"), ["trace_id", "keep"])
    return set(texts(verdicts.filter(verdicts["keep"])["trace_id"]))


def _refuse_lost_scores(requested: RunConfig, steps: list[RecordedStep]) -> None:
    """Refuse to sample anew what was scored again: the old scores would be back without a word."""
    if "rollout" in replayed_stages(requested.replay) and any("regrade" in past.work for past in steps):
        run, origin = requested.replay.run, next(past.work["rollout"] for past in steps).computed_by
        raise ConfigError(
            f"--from {requested.replay.from_stage}: the rollouts of {run!r} were scored again, and the replay "
            f"would lose these scores; use --from filtering to keep those scores, or replay {origin!r} to sample again"
        )


def _require_vocabulary(requested: RunConfig) -> None:
    """Refuse to filter without knowing the vocabulary: rollouts that were imported need not have come with it."""
    if requested.model.vocab_size or (needs_weights(requested.replay) and requested.replay.weights):
        return  # weights that are brought in say it
    kinds = {each.type for each in requested.filtering.filters}
    if "filtering" in replayed_stages(requested.replay) and "gibberish" in kinds:
        raise ConfigError(
            f"model.vocab_size: run {requested.replay.run!r} recorded none, which filter gibberish needs; say "
            f"it (--set model.vocab_size=N), or name the weights (--set model.path=DIRECTORY)"
        )


def _with_name(requested: RunConfig) -> RunConfig:
    """Give a replay without a name one that the same replay of the same run has again, so that it finds what it did."""
    if requested.name:
        return requested
    replay = requested.replay
    asked = {"content": content(requested, in_place=True), "replay": replay.model_dump(mode="json")}
    # Before the versions of this machine are filled in: another release gives the same replay the same name.
    digest = content_key(asked)
    return requested.model_copy(update={"name": f"{replay.run}-{replay.from_stage}-{digest[:8]}"})


def _with_weights(store: Store, requested: RunConfig, first: RecordedStep) -> RunConfig:
    """Let model.path name the weights that the replay starts from: in the store, as soon as they are there."""
    replay = requested.replay
    if not needs_weights(replay):
        return requested
    policy = first.policy.key if first.policy else ""
    if replay.weights:  # once they are imported, the directory they came from may be gone
        imported = store.ledger.entries(run=requested.name, stage="policy_import")
        policy = imported[0].key if imported else ""
    elif not policy:
        raise ConfigError(
            f"model.path: run {replay.run!r} recorded no weights; say which to start from (--set "
            f"model.path=DIRECTORY), or stop before training (--until packing)"
        )
    if not policy:
        return requested
    model = requested.model.model_copy(update={"path": str(whole_weights(store, policy))})
    return requested.model_copy(update={"model": model})


def _with_versions(requested: RunConfig) -> RunConfig:
    """Take the versions of what computes again from this machine: they are not the recorded ones."""
    again = replayed_stages(requested.replay)
    updates: dict[str, Any] = {}
    if "training" in again:
        updates["training"] = requested.training.model_copy(update={"version": ""})
    if "rollout" in again or needs_reference_scores(requested):
        updates["engine"] = requested.engine.model_copy(update={"version": ""})
    if "rollout" in again or requested.replay.regrade:
        updates["environments"] = tuple(each.model_copy(update={"version": ""}) for each in requested.environments)
    # A version that is empty is filled in with that of what is installed here.
    opened = reopened_teachers(reopen_versions(requested.model_copy(update=updates), again))
    return resolve(opened, config_versions(requested) | teacher_facts(opened))

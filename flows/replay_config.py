"""The config of a replay: that of the recorded run with what was asked for laid over it, resolved and checked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.errors import ConfigError
from configs.load import load
from configs.replay import ORDER, ReplayConfig, redone
from configs.resolve import resolve
from configs.run import RunConfig, View, content
from flows.facts import facts, has_cuda
from flows.graders import grader_digest
from flows.prepare import flat, nothing_started, recorded_config, require_same
from flows.recorded import Recorded, recorded_by, trace_ids
from flows.replaying import chosen
from storage.keys import content_key
from storage.store import Store, open_store
from tasks import advantage, assignment, filtering, packing, rollout, training

STAGES = {
    "assignment": assignment.STAGE,
    "rollout": rollout.STAGE,
    "filtering": filtering.STAGE,
    "advantage": advantage.STAGE,
    "packing": packing.STAGE,
    "training": training.STAGE,
}


@dataclass(frozen=True)
class Asked:
    """What somebody wants of a replay, as given; empty and None leave the choice to us."""

    run: str
    from_stage: str = ""
    until: str = ""
    steps: str = ""
    overrides: Sequence[str] = ()
    name: str = ""
    store: str = ""
    policies: str = ""
    regrade: bool = False
    quarantine: bool = True


def prepare_replay(asked: Asked) -> RunConfig:
    """Return the resolved config of a new replay, or of the replay of that name, to go on with it.

    Raises ConfigError where the run, a step or a stage is not there, a setting lies before the first stage to be done
    again, or the config does not hold together. Nothing is started or written.
    """
    with nothing_started():
        store = open_store(asked.store or RunConfig().store)
        begun = recorded_config(store, asked.name)
        asked = _as_begun(asked, begun)
        source = source_config(store, asked.run)
        recorded = recorded_by(store, asked.run)
        requested = _requested(begun or source, source, asked, _quarantines(store, recorded, asked, begun))
        _require_reached(source, requested)
        steps = chosen(requested.replay, recorded)
        config = _resolved(_with_weights(store, _named(requested), steps[0].policy))
        known = recorded_config(store, config.name)
        if known is not None:
            require_same(known, config)
        return config.model_copy(update={"steps": len(steps)})


def _as_begun(asked: Asked, begun: RunConfig | None) -> Asked:
    """Fill in, of a replay that goes on, what it was asked for when it began, as far as it is not said again."""
    if begun is None:
        return asked
    if begun.kind != "replay":
        raise ConfigError([f"name: {begun.name!r} is a run of kind {begun.kind}; give the replay a name of its own"])
    replay = begun.replay
    last = "" if replay.last_step is None else replay.last_step
    return replace(
        asked,
        run=asked.run or replay.run,
        from_stage=asked.from_stage or replay.from_stage,
        until=asked.until or replay.until,
        steps=asked.steps or f"{replay.first_step}:{last}",
        policies=asked.policies or replay.policies,
        regrade=asked.regrade or replay.regrade,
    )


def source_config(store: Store, run: str) -> RunConfig:
    """Return the config of the run to be replayed; raises ConfigError where there is none to be gone through again."""
    config = recorded_config(store, run)
    if config is None:
        known = ", ".join(store.runs.names()[-5:]) or "none"
        raise ConfigError([f"store {store.root.address}: there is no run {run!r}; the last runs are: {known}"])
    if config.kind == "evaluate":
        raise ConfigError([f"run {run!r} is an evaluation: it has no steps to go through again; replay a training run"])
    return config


def _quarantines(store: Store, recorded: Recorded, asked: Asked, begun: RunConfig | None) -> tuple[str, ...]:
    """Return the ids of the quarantines that name a rollout of the recorded steps, sorted; one that goes on keeps its
    own, for its rows would otherwise be of two kinds."""
    if begun is not None:
        return begun.replay.quarantines
    if not asked.quarantine:
        return ()
    findings = store.quarantines.all()
    if not findings:
        return ()
    sampled = [past.work["rollout"] for past in recorded.steps.values() if "rollout" in past.work]
    ids = {trace_id for entry in sampled for trace_id in trace_ids(store, entry)}
    return tuple(sorted({each.quarantine for each in findings if not ids.isdisjoint(each.trace_ids)}))


def _requested(start: RunConfig, source: RunConfig, asked: Asked, quarantines: tuple[str, ...]) -> RunConfig:
    """Return the config `start` with what was asked for laid over it."""
    # What the source was called, and what it went through again, is its own.
    own = {"kind": "replay", "name": asked.name, "replay": ReplayConfig().model_dump(mode="json")}
    own["store"] = asked.store or RunConfig().store
    changed = load((), asked.overrides, base=start.model_dump(mode="json") | own)
    if changed.kind != "replay" or changed.replay != ReplayConfig():
        raise ConfigError(
            ["replay: what is gone through again is said by options (--from, --steps, ...), not by --set"]
        )
    first, last = _range(asked.steps)
    begin = _first_stage(source, changed, asked, bool(quarantines))
    until = asked.until or "training"
    settings = {
        "run": asked.run,
        "from_stage": begin,
        "until": until,
        "first_step": first,
        "last_step": last,
        "policies": asked.policies or "own",
        "regrade": asked.regrade,
        "graders": grader_digest(changed.environments) if asked.regrade else "",
        "fresh_weights": changed.model.path not in (source.model.path, start.model.path) or start.replay.fresh_weights,
    }
    # Loaded once more, for the messages about what is misspelt.
    requested = load((), (), base=changed.model_dump(mode="json") | {"replay": settings | {"quarantines": quarantines}})
    if not redone(requested.replay):
        raise ConfigError([f"replay: --until {until} comes before --from {begin}; the order is {', '.join(ORDER)}"])
    return requested


def _range(text: str) -> tuple[int, int | None]:
    """Return first and last step of `3:10`, `3:`, `:10` or `3`; the last is not in the range, None is no end."""
    match = re.fullmatch(r"(\d*)(:?)(\d*)", text.strip())
    if match is None or (text and not match[1] and not match[3] and not match[2]):
        raise ConfigError([f"--steps {text}: say 3:10 (3 to 9), 3: or :10, or one step"])
    first = int(match[1] or 0)
    last = int(match[3]) if match[3] else None if match[2] or not text else first + 1
    if last is not None and last <= first:
        raise ConfigError([f"--steps {text}: holds no step; the second number is the first step left out"])
    return first, last


def _first_stage(source: RunConfig, changed: RunConfig, asked: Asked, quarantined: bool) -> str:
    """Return the stage to begin with: the one asked for, or the first that settings and quarantines reach."""
    reached = [stage for stage in ORDER if _content(source, stage) != _content(changed, stage)]
    begin = asked.from_stage or min([*reached, "training"], key=ORDER.index)
    if asked.regrade or quarantined:
        if asked.from_stage not in ("", "rollout", "filtering", "assignment"):
            why = "--regrade scores before filtering" if asked.regrade else "some of its rollouts are in quarantine"
            raise ConfigError(
                [f"--from {asked.from_stage}: {why}; begin there (--from filtering), or leave it (--no-quarantine)"]
            )
        return "filtering" if asked.regrade else min(begin, "filtering", key=ORDER.index)
    return begin


def _content(config: RunConfig, stage: str) -> dict[str, Any]:
    return View(config, STAGES[stage].sections, stage).content()


def _require_reached(source: RunConfig, requested: RunConfig) -> None:
    """Refuse settings that no stage of the replay would read: the rows before it are the recorded ones."""
    again = redone(requested.replay)
    seen = {section for stage in again for section in STAGES[stage].sections}
    seen |= {"environments"} if requested.replay.regrade else set()
    old, new = dict(flat(content(source))), dict(flat(content(requested)))
    differing = [key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]
    own = [stage for stage in ORDER if stage not in again]
    lines = [
        f"{key}: belongs to stage {stage}, which this replay takes as it was recorded; use --from {stage}"
        for key in differing
        if key.partition(".")[0] not in seen
        for stage in own
        if key.partition(".")[0] in STAGES[stage].sections
    ]
    if lines:
        raise ConfigError(list(dict.fromkeys(lines)))


def _named(requested: RunConfig) -> RunConfig:
    """Give a replay without a name one that the same replay of the same run has again, so that it finds what it did."""
    if requested.name:
        return requested
    replay = requested.replay
    digest = content_key({"content": content(requested), "replay": replay.model_dump(mode="json")})
    return requested.model_copy(update={"name": f"{replay.run}-{replay.from_stage}-{digest[:8]}"})


def _with_weights(store: Store, requested: RunConfig, policy: Any) -> RunConfig:
    """Let model.path name the weights in the store that the replay starts from; the original may be gone."""
    if requested.replay.fresh_weights:
        return requested
    if policy is None:
        if "training" in redone(requested.replay) or "rollout" in redone(requested.replay):
            raise ConfigError(
                [
                    f"model.path: run {requested.replay.run!r} recorded no weights; say which to start from (--set "
                    f"model.path=DIRECTORY), or stop before training (--until packing)"
                ]
            )
        return requested
    if not {"training", "rollout"} & set(redone(requested.replay)):
        return requested
    path = str(store.policies.directory(policy.key))
    return requested.model_copy(update={"model": requested.model.model_copy(update={"path": path})})


def _resolved(requested: RunConfig) -> RunConfig:
    """Take the versions of what computes again from this machine: they are not the recorded ones."""
    again = redone(requested.replay)
    updates: dict[str, Any] = {}
    if "training" in again:
        updates["training"] = requested.training.model_copy(update={"version": ""})
    if "rollout" in again:
        updates["engine"] = requested.engine.model_copy(update={"version": ""})
    if "rollout" in again or requested.replay.regrade:
        updates["environments"] = tuple(each.model_copy(update={"version": ""}) for each in requested.environments)
    config = resolve(requested.model_copy(update=updates), facts(requested))
    _require_device(config)
    return config


def _require_device(config: RunConfig) -> None:
    if "training" in redone(config.replay) and config.training.device == "cuda" and not has_cuda():
        raise ConfigError(
            [
                "training.device: recorded as cuda, and this machine has none; replay with --set training.device=cpu "
                "training.dtype=float32 (other weights will come out), or stop before training (--until packing)"
            ]
        )

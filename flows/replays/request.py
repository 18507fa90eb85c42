"""What somebody asks of a replay: which run, stages and steps, which settings; and what cannot be asked."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.checks.environments import OF_OUR_SERVERS
from configs.environments import SeatRule
from configs.errors import ConfigError
from configs.replay import ORDER, StageName, needs_weights, replayed_stages
from configs.run import RunConfig, View, needs_reference_scores
from configs.sampling import SamplingConfig
from storage.store import Store
from tasks.stage_tasks import services_of, stage_of
from tasks.stages import REPLAYABLE

SERVICES = {name: next(each for each in REPLAYABLE if name in services_of(each)) for name in ("learner", "engine")}
SERVICES |= {"gate": "training"}
"""Sections that no key of a stage holds, by the stage that has a use for them."""
ANYWAY = ("prefect", "tracking", "alerts")
REGRADED = ("taskset", "harness", "runtime", "group_rewards")
"""What of an environment its reward functions may see."""
SAMPLED = (
    *("env", "seats", "bindings", "harness", "runtime", "max_turns", "address", "group_rewards"),
    *(*SamplingConfig.model_fields, *OF_OUR_SERVERS),
)
"""What of an environment may change while its examples and assignments are the recorded ones."""


@dataclass(frozen=True)
class ReplayRequest:
    """What somebody wants of a replay, as given; empty leaves the choice to us."""

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


def as_begun(asked: ReplayRequest, begun: RunConfig | None) -> ReplayRequest:
    """Fill in, of a replay that goes on, what it was asked for when it began, as far as it is not said again."""
    if begun is None:
        return asked
    if begun.kind != "replay":
        raise ConfigError(f"name: {begun.name!r} is a run of kind {begun.kind}; give the replay a name of its own")
    replay = begun.replay
    if not asked.quarantine and replay.quarantines:
        left_out = f"{begun.name!r} began without the rollouts in quarantine"
        raise ConfigError(f"--no-quarantine: {left_out}; give another replay its name")
    return replace(
        asked,
        run=asked.run or replay.run,
        from_stage=asked.from_stage or replay.from_stage,
        until=asked.until or replay.until,
        steps=asked.steps or f"{replay.first_step}:{replay.last_step}",
        policies=asked.policies or replay.policies,
        regrade=asked.regrade or replay.regrade,
    )


def step_range(text: str) -> tuple[int, int | None]:
    """Return first and last step of `3:10`, `3:`, `:10` or `3`; the last is not in the range, None is no end."""
    match = re.fullmatch(r"([0-9]{0,9})(:?)([0-9]{0,9})", text.strip())
    if match is None:
        raise ConfigError(f"--steps {text}: say 3:10 (3 to 9), 3: or :10, or one step")
    first = int(match[1] or 0)
    last = int(match[3]) if match[3] else None if match[2] or not text else first + 1
    if last is not None and last <= first:
        raise ConfigError(f"--steps {text}: holds no step; the second number is the first step left out")
    return first, last


NOT_SAMPLED = (
    "a run of demonstrations or preferences is replayed from filtering on, without --regrade: nothing was sampled for "
    "it; new runs read the file, or the recorded runs, again"
)


def first_stage(source: RunConfig, changed: RunConfig, asked: ReplayRequest, standing: bool) -> str:
    """Return the stage to begin with: the one asked for, or the first that settings and quarantines reach.

    `standing` tells whether a rollout in quarantine was kept by the recorded filtering.
    """
    # Scores are read by the filters first, so whatever else was asked for, it begins there.
    if asked.regrade:
        if source.data.path or source.data.runs:
            raise ConfigError(NOT_SAMPLED)
        if asked.from_stage not in ("", "rollout", "filtering"):
            raise ConfigError(f"--from {asked.from_stage}: --regrade scores recorded rollouts before filtering")
        return "filtering"
    reached = [stage for stage in ORDER if content_of(source, stage) != content_of(changed, stage)]
    # Without a setting that reaches an earlier stage, the last one of the replay is done again and no other.
    last = asked.until if asked.until in ORDER else "training"
    begin = asked.from_stage or min([*reached, last], key=_place)
    # Later stages go by the verdicts: a rollout that is unfit would be credited and trained on.
    if standing and _place(begin) > _place("filtering"):
        if asked.from_stage:
            raise ConfigError(
                f"--from {asked.from_stage}: rollouts that are in quarantine now were kept by the recorded "
                f"filtering; begin there (--from filtering), or keep them (--no-quarantine)"
            )
        return "filtering"
    return begin


def content_of(config: RunConfig, stage: str) -> dict[str, Any]:
    """Return the settings in the key of a stage; of a run from data, these stand where rollouts do."""
    data = "demonstration" if config.data.path else "preference" if config.data.runs else stage
    known = data if stage == "rollout" else stage
    return View(config, stage_of(known).sections, stage).content()


def override_keys(overrides: Sequence[str]) -> list[str]:
    """Return the dotted keys that overrides set."""
    return [override.partition("=")[0].strip() for override in overrides]


def names_weights(overrides: Sequence[str]) -> bool:
    """Tell whether other weights than the recorded ones were asked for."""
    return "model.path" in override_keys(overrides)


def refuse_what_options_say(overrides: Sequence[str]) -> None:
    """Refuse settings that have an option of their own. Raises ConfigError."""
    options = {"replay": "--from, --until, --steps", "steps": "--steps", "name": "--name", "store": "--store"}
    options["kind"] = "another command"
    sections = {key: key.partition(".")[0] for key in override_keys(overrides)}
    said = {key: options[section] for key, section in sections.items() if section in options}
    if said:
        raise ConfigError([f"{key}: is said by options ({names}), not by --set" for key, names in said.items()])


def refuse_unread(requested: RunConfig, overrides: Sequence[str], has_data: bool) -> None:
    """Refuse settings that no stage of the replay reads: what lies before it is the recorded work.

    Raises ConfigError, also for what a run from data, and recorded examples, cannot be replayed with.
    """
    again = replayed_stages(requested.replay)
    if has_data and {"assignment", "rollout"} & set(again):
        raise ConfigError(NOT_SAMPLED)
    if names_weights(overrides) and not needs_weights(requested.replay):
        raise ConfigError("model.path: no weights are needed by the stages that are done again; leave it out")
    scored = needs_reference_scores(requested)
    reasons = (_unread(key, again, requested.replay.regrade, scored) for key in override_keys(overrides))
    if lines := [reason for reason in reasons if reason]:
        raise ConfigError(lines)


def _unread(key: str, again: Sequence[StageName], regrade: bool, scored: bool) -> str:
    """Return why a setting would mean nothing; empty where it is read."""
    section, _, rest = key.partition(".")
    field = rest.partition(".")[2].partition(".")[0]
    if section == "environments" and field == "algorithm":
        section = "algorithm"  # read by whoever reads the run's
    if section == "environments" and field in SeatRule.model_fields:
        section = "filtering"  # which says whose rollouts are left out; later stages go by that
    # It would be in a key and be a lie: what computes is what is installed.
    if key.endswith(".version"):
        return f"{key}: versions are those of what is installed here"
    if section in ANYWAY or SERVICES.get(section) in again or (section == "model" and rest in ("path", "tokenizer")):
        return ""
    if section == "environments" and "assignment" not in again:
        if field in (SAMPLED if "rollout" in again else REGRADED if regrade else ()):
            return ""
        return f"{key}: the examples are the recorded ones; use --from assignment, or start a new run"
    read = [*again, *(["reference"] if scored else [])]
    if any(section in stage_of(stage).sections for stage in read):
        return ""
    own = next((stage for stage in ORDER if section in stage_of(stage).sections), "")
    if own:
        return f"{key}: belongs to stage {own}, which this replay takes as it was recorded; use --from {own}"
    return f"{key}: no stage of a replay reads it"


def _place(stage: str) -> int:
    """Return a stage's place in the order; -1 for one that is misspelt, which the config refuses in its own words."""
    return list(ORDER).index(stage) if stage in ORDER else -1


def refuse_removed(store: Store, source: str, begun: RunConfig | None) -> None:
    """Raise ConfigError where the run to be replayed was removed; `begun` is the replay to be continued, if any."""
    if store.runs.events(source)[-1].event != "removed":
        return
    line = f"run {source!r} was removed from the store (stagecoach gc): its steps are gone"
    if begun is None:
        raise ConfigError(line)
    at = f"{begun.name} --store {shlex.quote(begun.store)}"
    raise ConfigError(
        f"{line}. This replay cannot go on. Look at what it finished with stagecoach show {at}; its whole steps can be "
        f"gone through in turn: stagecoach replay {at}; for the others record a new run (stagecoach run), and replay it"
    )

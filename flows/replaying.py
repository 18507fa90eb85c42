"""Replaying: the stages of recorded steps again, from a chosen one on, over what the steps before it recorded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from configs.errors import ConfigError
from configs.replay import ORDER, ReplayConfig, StageName, needs_weights, redone
from configs.run import RunConfig, View
from flows import pipeline
from flows.pipeline import Check, Do, Drawn, Source
from flows.recorded import Recorded, RecordedStep, policy_of, trace_ids
from storage.keys import content_key
from storage.refs import Entry
from storage.store import Store
from tasks import assignment, examples, filtering, packing, regrade, rollout
from tasks.stage import Policy, Ref, StageTask


class Shares(Do, Protocol):
    """Does stages, and takes over work that another run has finished."""

    def share(self, entry: Entry, step: int) -> Ref:
        """Return the reference to finished work of another run, made part of this one."""
        ...


Quarantined = Callable[[Ref], Mapping[str, str]]
"""Returns, of the traces that work made if it is finished, those that are in quarantine: reason by trace id."""


@dataclass(frozen=True)
class Replayed:
    """One step gone through again."""

    step: int
    past: RecordedStep
    work: Mapping[str, Ref]
    """The references by stage, shared and done again."""
    sampled_by: str | None
    """Key of the policy that sampled the rollouts; None where that is not known."""
    drawn: Drawn | None
    """The step's way to packed batches; None where the replay ends before them."""
    policy_in: Policy | None
    """The policy that the step began with."""
    policy: Policy | None
    """The policy it made; None where it did not train."""


def chosen(replay: ReplayConfig, recorded: Recorded) -> list[RecordedStep]:
    """Return the recorded steps that a replay goes through.

    Raises ConfigError where a step that was asked for was not recorded as far as the replay needs it.
    """
    last = replay.last_step
    whole = {step: past for step, past in recorded.steps.items() if not _lacking(replay, past)}
    wanted = [step for step in whole if step >= replay.first_step and (last is None or step < last)]
    absent = sorted(set(range(replay.first_step, last or 0)) - whole.keys())
    if absent or not wanted:
        raise ConfigError(
            [
                f"replay: run {replay.run!r} has not recorded step {', '.join(map(str, absent)) or replay.first_step} "
                f"up to stage {_before(replay)}; it has the steps {_ranges(list(whole)) or 'none'}. Nothing was "
                f"started; choose among these (--steps), or let the run go on first: stagecoach resume {replay.run}"
            ]
        )
    return [whole[step] for step in wanted]


def replay_steps(
    do: Shares,
    source: Source,
    config: RunConfig,
    recorded: Recorded,
    quarantined: Quarantined = lambda ref: {},
    check: Check = lambda drawn: None,
) -> Iterator[Replayed]:
    """Walk the chosen steps and yield each that is done.

    With `replay.policies` "own" each step starts from the policy that the replay made before; the first one, and with
    "recorded" every one, starts from the recorded policy. A batch that is empty is not trained on.
    """
    policy: Policy | None = None
    before: Policy | None = None
    credits: Ref | None = None
    for past in chosen(config.replay, recorded):
        credits = credits or _credits_before(do, config, recorded, past)
        if policy is None or config.replay.policies == "recorded":
            policy = _begin(do, source, config, past)
            before = policy if config.replay.weights else recorded.sampler(past) or policy
        lags = config.rollout.max_off_policy_steps or config.replay.policies == "recorded"
        step = _Step(do, past, config, quarantined, policy, before if lags else policy, credits)
        yield (done := step.through(check))
        credits = done.work.get("advantage")
        policy, before = done.policy or policy, policy


def _begin(do: Shares, source: Source, config: RunConfig, past: RecordedStep) -> Policy | None:
    """Return the policy that a step starts from: the recorded one, or that of `model.path`."""
    if not needs_weights(config.replay):
        return None
    if config.replay.weights:
        return replace(pipeline.first_policy(do, source), version=past.step)
    return policy_of(past.policy, past.step) if past.policy else None


def _credits_before(do: Shares, config: RunConfig, recorded: Recorded, past: RecordedStep) -> Ref | None:
    """Return the recorded credits of the step before the first one of a replay, where an estimator has state."""
    earlier = recorded.steps.get(past.step - 1)
    if not config.stateful or earlier is None or "advantage" not in earlier.work:
        return None
    return do.share(earlier.work["advantage"], past.step - 1)


@dataclass
class _Step:
    """One step on its way from what was recorded to what is new."""

    do: Shares
    past: RecordedStep
    config: RunConfig
    quarantined: Quarantined
    policy: Policy | None
    sampler: Policy | None
    credits: Ref | None
    """The credits of the step before, whose state estimators go on from."""
    work: dict[str, Ref] = field(default_factory=dict)

    def through(self, check: Check) -> Replayed:
        """Go through all stages; recorded ones are shared, the others done."""
        self.work["examples"] = self.do(examples.task, 0) if self._listed_otherwise() else self._share("examples")
        self._stage("assignment", self._assign)
        self._stage("rollout", self._sample)
        if self.config.replay.regrade:
            self.work["regrade"] = self._regrade()
        elif "regrade" in self.past.work and "rollout" not in redone(self.config.replay):
            self.work["regrade"] = self._share("regrade")
        self._stage("filtering", self._filter)
        self._stage("advantage", self._credit)
        self._stage("packing", lambda: self._do(packing.task, self.work["advantage"], *self._traces))
        drawn = self._drawn()
        made = self._train(drawn, check)
        return Replayed(self.past.step, self.past, self.work, self._sampled_by(), drawn, self.policy, made)

    def _stage(self, stage: StageName, again: Callable[[], Ref]) -> None:
        """Do a stage again or share what was recorded; nothing where it lies behind the end of the replay."""
        if stage in redone(self.config.replay):
            self.work[stage] = again()
        elif ORDER.index(stage) < ORDER.index(self.config.replay.from_stage):
            self.work[stage] = self._share(stage)

    def _share(self, stage: str) -> Ref:
        return self.do.share(self.past.work[stage], self.past.work[stage].step)

    def _do(self, task: StageTask, *refs: Ref, policy: Policy | None = None) -> Ref:
        return self.do(task, self.past.step, refs, policy)

    def _assign(self) -> Ref:
        """Assign again; where the recorded step was trained on a later batch than its first, that one."""
        batch = self.past.work["assignment"].inputs.get("batch", "0") if "assignment" in self.past.work else "0"
        again = {"batch": batch} if batch != "0" else {}
        bag = {"batch": int(batch)}
        return self.do(assignment.task, self.past.step, (self.work["examples"],), services=bag, extra_inputs=again)

    def _credit(self) -> Ref:
        return pipeline.credit(self.do, self.past.step, self._traces, self.work["filtering"], self.config, self.credits)

    def _listed_otherwise(self) -> bool:
        """Tell whether examples are to be listed again: the recorded ones are of other environments' settings."""
        view = View(self.config, examples.task.stage.sections, "examples").content()
        return "assignment" in redone(self.config.replay) and view != dict(self.past.work["examples"].section)

    def _sample(self) -> Ref:
        refs = self.work["assignment"], self.work["examples"]
        return self._do(rollout.task, *refs, policy=self.sampler)

    def _sampled_by(self) -> str | None:
        if "rollout" in redone(self.config.replay):
            return self.sampler.key if self.sampler else None
        return self.past.work["rollout"].inputs.get("policy")

    def _regrade(self) -> Ref:
        refs = self.work["rollout"], self.work["examples"]
        digest = {"graders": self.config.replay.graders}
        return self.do(regrade.task, self.past.step, refs, extra_inputs=digest)

    def _filter(self) -> Ref:
        """Filter; a step that no quarantine touches keeps the key that it would have without one."""
        found = self.quarantined(self.work["rollout"])
        extra = {"quarantine": content_key(sorted(found.items()))} if found else {}
        bag = {"quarantined": found}
        return self.do(filtering.task, self.past.step, self._traces, services=bag, extra_inputs=extra)

    @property
    def _traces(self) -> tuple[Ref, ...]:
        return tuple(self.work[name] for name in ("regrade", "rollout") if name in self.work)

    def _drawn(self) -> Drawn | None:
        if "packing" not in self.work:
            return None
        named = (self.work[name] for name in ("filtering", "advantage", "packing"))
        return Drawn(self.work["assignment"], self._traces, *named)

    def _train(self, drawn: Drawn | None, check: Check) -> Policy | None:
        if drawn is None or "training" not in redone(self.config.replay) or not drawn.packing.num_rows("batches"):
            return None
        assert self.policy is not None, "a replay that trains has weights to start from; prepare_replay saw to it"
        check(drawn)
        pipeline.pass_gate(self.do, self.past.step, drawn, self.policy, self.config)
        self.work["training"], made = pipeline.train(self.do, self.past.step, drawn, self.policy)
        return made


def quarantined_in(store: Store, replay: ReplayConfig) -> Quarantined:
    """Return what looks up which traces a replay leaves out, and why; of rollouts to come none is known to be unfit."""
    if not replay.quarantines:
        return lambda ref: {}
    reasons = store.quarantines.reasons(replay.quarantines)

    def quarantined(ref: Ref) -> dict[str, str]:
        entry = store.ledger.find(ref.key)
        return {name: reasons[name] for name in trace_ids(store, entry) if name in reasons} if entry else {}

    return quarantined


def _lacking(replay: ReplayConfig, past: RecordedStep) -> list[str]:
    """Return the stages before the first one to be done again that a step did not record."""
    needed = ("examples", *ORDER[: ORDER.index(replay.from_stage)])
    return [stage for stage in needed if stage not in past.work]


def _before(replay: ReplayConfig) -> str:
    place = ORDER.index(replay.from_stage)
    return ORDER[place - 1] if place else "examples"


def _ranges(steps: Sequence[int]) -> str:
    """Return step numbers as ranges whose ends are not in them, as --steps takes them."""
    starts = [step for step in steps if step - 1 not in steps]
    ends = [step + 1 for step in steps if step + 1 not in steps]
    return ", ".join(f"{start}:{end}" for start, end in zip(starts, ends, strict=True))

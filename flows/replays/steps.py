"""Replays recorded steps: their stages again from a chosen one on, over what the stages before it recorded."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from configs.errors import ConfigError
from configs.replay import ORDER, ReplayConfig, StageName, needs_weights, replayed_stages
from configs.run import RunConfig, View
from flows.queries.step_history import RecordedStep, StepHistory, policy_of, trace_ids
from flows.runtime import pipeline
from flows.runtime.executor import Executor
from flows.runtime.records import StepBatch
from flows.runtime.resolve_run import Source
from flows.runtime.rollouts import RolloutSource, assign, sampling_policy
from storage.keys import content_key
from storage.store import Store
from tasks.assignment import examples
from tasks.filtering import stage as filtering
from tasks.rollout import regrade
from tasks.rollout import stage as rollout
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.stage import Policy, Ref, ref_of


def chosen_steps(replay: ReplayConfig, recorded: StepHistory) -> list[RecordedStep]:
    """Return the recorded steps that a replay goes through.

    Raises ConfigError where a step that was asked for was not recorded as far as the replay needs it.
    """
    last = replay.last_step
    whole = {step: past for step, past in recorded.steps.items() if not _lacking(replay, past, recorded.refills)}
    wanted = [step for step in whole if step >= replay.first_step and (last is None or step < last)]
    absent = sorted(set(range(replay.first_step, last or 0)) - whole.keys())
    if absent or not wanted:
        before = ("examples", *ORDER)[ORDER.index(replay.from_stage)]
        if recorded.refills and replay.from_stage not in ("assignment", "training"):
            before = "packing, which tells that all its groups were sampled"
        raise ConfigError(
            f"replay: run {replay.run!r} has not recorded step {', '.join(map(str, absent)) or replay.first_step} "
            f"up to stage {before}; it has the steps {_ranges(list(whole)) or 'none'}. "
            "Nothing was started; choose among these (--steps), or let the run go on first: "
            f"stagecoach resume {replay.run}"
        )
    return [whole[step] for step in wanted]


def _lacking(replay: ReplayConfig, past: RecordedStep, refills: bool) -> list[str]:
    """Return the stages before the first one to be done again that a step did not record.

    Where groups are replaced, a step that was not packed may still lack rollouts; those recorded would be some of them.
    """
    # Examples are of the run and not of a step, but every assignment is made of them.
    needed = ["examples", *ORDER[: ORDER.index(replay.from_stage)]]
    if refills and replay.from_stage != "assignment":
        needed.append("packing")
    return [stage for stage in needed if stage not in past.work]


def _ranges(steps: Sequence[int]) -> str:
    """Return step numbers as ranges whose ends are not in them, as --steps takes them."""
    starts = [step for step in steps if step - 1 not in steps]
    ends = [step + 1 for step in steps if step + 1 not in steps]
    return ", ".join(f"{start}:{end}" for start, end in zip(starts, ends, strict=True))


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
    batch: StepBatch | None
    """The results up to packed batches; None where the replay ends before them."""
    policy_in: Policy | None
    """The policy that the step began with."""
    policy: Policy | None
    """The policy it made; None where it did not train."""


def replay_steps(
    execute: Executor,
    source: Source,
    config: RunConfig,
    recorded: StepHistory,
    quarantined: Quarantined = lambda ref: {},
) -> Iterator[Replayed]:
    """Walk the chosen steps and yield each that is done.

    With `replay.policies` "own" each step starts from the policy that the replay made before; the first one, and with
    "recorded" every one, starts from the recorded policy. A batch that is empty is not trained on.
    """
    policy: Policy | None = None
    before: Policy | None = None
    credits: Ref | None = None
    earlier: tuple[Ref, ...] = ()
    for past in chosen_steps(config.replay, recorded):
        credits = credits or _credits_before(config, recorded, past)
        earlier = _sampled_before(config, recorded, past, earlier)
        if policy is None or config.replay.policies == "recorded":
            policy = _begin(execute, source, config, past)
            before = policy if config.replay.weights else recorded.sampler(past) or policy
        # A run that samples ahead sampled with the policy before, as the recorded steps did.
        lags = config.rollout.max_off_policy_steps or config.replay.policies == "recorded"
        sampler = before if lags else policy
        sampled = sampler if "rollout" in replayed_stages(config.replay) else recorded.sampler(past)
        step = _Step(execute, past, config, quarantined, policy, sampler, credits, earlier, sampled)
        yield (done := step.through())
        credits, earlier = done.work.get("advantage"), step.sampled_so_far
        policy, before = done.policy or policy, policy


def _begin(execute: Executor, source: Source, config: RunConfig, past: RecordedStep) -> Policy | None:
    """Return the policy that a step starts from: the recorded one, or that of `model.path`."""
    if not needs_weights(config.replay):
        return None
    if config.replay.weights:
        return replace(pipeline.first_policy(execute, source), version=past.step)
    return policy_of(past.policy, past.step) if past.policy else None


def _credits_before(config: RunConfig, recorded: StepHistory, past: RecordedStep) -> Ref | None:
    """Return the recorded credits that the first step of a replay goes on from, where an estimator has state.

    Like what samplers go on from they are of a step that the replay does not go through: no part of it.
    """
    credits = recorded.credits_before(past.step) if config.stateful else None
    return ref_of(credits.entry, computed=False) if credits else None


def _sampled_before(
    config: RunConfig, recorded: StepHistory, past: RecordedStep, own: tuple[Ref, ...]
) -> tuple[Ref, ...]:
    """Return what a sampler with state goes on from: what the replay itself (`own`) sampled for the step before, or
    else what was recorded of it; of a step that was sampled again, the batch that was left for it."""
    if not config.assignment.sampler.stateful or "assignment" not in replayed_stages(config.replay):
        return ()
    assigned, before = past.work.get("assignment"), recorded.steps.get(past.step - 1)
    again = assigned is not None and assigned.inputs.get("batch", "0") != "0"
    if own and not again:
        return own
    state = recorded.state_of(assigned) if assigned is not None else []
    if before is not None and not state:
        state = [work for stage in ("assignment", "regrade", "rollout") for work in before.of(stage).values()]
    return tuple(ref_of(work.entry, computed=False) for work in state)


@dataclass
class _Step:
    """One step on its way from what was recorded to what is new."""

    execute: Executor
    past: RecordedStep
    config: RunConfig
    quarantined: Quarantined
    policy: Policy | None
    sampler: Policy | None
    samples: Ref | None
    """The credits of the step before, whose state estimators go on from."""
    earlier: tuple[Ref, ...]
    """The assignments and rollouts of the step before, whose state samplers go on from."""
    sampled_by: Policy | None
    """The policy whose rollouts are credited, which scores them where an algorithm wants that; None is not known."""
    work: dict[str, Ref] = field(default_factory=dict)

    @property
    def stages_again(self) -> tuple[StageName, ...]:
        """The stages that are done again."""
        return replayed_stages(self.config.replay)

    def through(self) -> Replayed:
        """Go through all stages; recorded ones are shared, the others done."""
        # Examples are listed again where they are to be those of other environments' settings.
        settings = View(self.config, examples.task.stage.sections, "examples").content()
        other = "assignment" in self.stages_again and settings != dict(self.past.work["examples"].entry.section)
        self.work["examples"] = self.execute(examples.task, 0) if other else self._share("examples")
        # Replacing groups needs the credits of those sampled: the stages between go round together.
        if self.config.assignment.refill and {"assignment", "advantage"} <= {*self.stages_again}:
            self._refill()
        else:
            self._in_turn()
        self._stage("packing", lambda: {"packing": self._pack()})
        batch = self._batch()
        made = self._train(batch)
        if self._traces:  # of assignments alone there is nothing to measure
            early = (*self._of("assignment"), *self._traces, *self._of("filtering"), *self._of("advantage"))
            measured = (*(batch.refs if batch else early), *self._of("training"))
            self.work["metrics"] = pipeline.write_metrics(self.execute, self.past.step, measured)
        if "rollout" in self.stages_again:
            sampled_by = self.sampler.key if self.sampler else None
        else:
            sampled_by = self.past.work["rollout"].inputs.get("policy") if "rollout" in self.past.work else None
        return Replayed(self.past.step, self.past, self.work, sampled_by, batch, self.policy, made)

    def _in_turn(self) -> None:
        """Go through the stages up to the advantages, over as many assignments as were recorded."""
        self._stage("assignment", self._assign)
        self._stage("rollout", self._sample)
        if self.config.replay.regrade:
            refs = *self._of("rollout"), self.work["examples"]
            digest = {"graders": self.config.replay.graders}
            self.work["regrade"] = self.execute(regrade.task, self.past.step, refs, extra_inputs=digest)
        elif "regrade" in self.past.work and "rollout" not in self.stages_again:
            self.work["regrade"] = self._share("regrade")
        self._stage("filtering", lambda: {"filtering": self._filter(self._traces)})
        if "reference" in self.past.work and "advantage" not in self.stages_again:
            self.work["reference"] = self._share("reference")
        self._stage("advantage", lambda: {"advantage": self._credit(self._traces)})

    def _refill(self) -> None:
        """Sample again, with groups in place of those that teach nothing: as many as turn out to be missing now."""
        rollouts = RolloutSource(self.execute, self.work["examples"])
        sample = partial(rollouts.sample, self.past.step, policy=self.sampler)
        assigned, sampled, credited = pipeline.sample_groups(
            rollouts, self.past.step, self.earlier, sample, self._filter_and_credit
        )
        self.work |= _numbered_refs("assignment", assigned) | _numbered_refs("rollout", sampled)
        self.work["filtering"], self.work["advantage"] = credited

    def _filter_and_credit(self, traces: tuple[Ref, ...]) -> tuple[Ref, Ref]:
        self.work["filtering"] = self._filter(traces)
        return self.work["filtering"], self._credit(traces)

    def _stage(self, stage: StageName, again: Callable[[], Mapping[str, Ref]]) -> None:
        """Do a stage again or share what was recorded; nothing where it lies behind the end of the replay."""
        if stage in self.stages_again:
            self.work |= again()
        elif ORDER.index(stage) < ORDER.index(self.config.replay.from_stage):
            self.work |= {name: self._share(name) for name in self.past.of(stage)}

    def _share(self, name: str) -> Ref:
        return self.execute.share(self.past.work[name].entry, self.past.work[name].step)

    def _compute(self, task: StageTask, *refs: Ref, policy: Policy | None = None) -> Ref:
        return self.execute(task, self.past.step, refs, policy)

    def _assign(self) -> dict[str, Ref]:
        """Assign again what was recorded: a later batch than the first where that was trained on, or several."""
        made: list[Ref] = []
        for inputs in [work.inputs for work in self.past.of("assignment").values()] or [{}]:
            groups = json.loads(inputs["groups"]) if "groups" in inputs else None
            arguments = self.past.step, self.work["examples"], int(inputs.get("batch", "0"))
            made.append(assign(self.execute, *arguments, made or self.earlier, groups))
        return _numbered_refs("assignment", made)

    def _credit(self, traces: tuple[Ref, ...]) -> Ref:
        verdicts = self.work["filtering"]
        return pipeline.credit(self.execute, self.past.step, traces, verdicts, self.samples, self.sampled_by)

    def _pack(self) -> Ref:
        verdicts, credits = self.work["filtering"], self.work["advantage"]
        return pipeline.pack(self.execute, self.past.step, self._traces, verdicts, credits)

    def _sample(self) -> dict[str, Ref]:
        """Sample every assignment again."""
        assigned, examples = self._of("assignment"), self.work["examples"]
        policy = sampling_policy(self.sampler, self.config)
        return _numbered_refs(
            "rollout", [self._compute(rollout.task, ref, examples, policy=policy) for ref in assigned]
        )

    def _filter(self, traces: tuple[Ref, ...]) -> Ref:
        """Filter; a step that no quarantine touches keeps the key that it would have without one."""
        # A regrade has the same traces as its rollouts.
        sampled = [ref for ref in traces if ref.stage != "regrade"]
        found = {name: reason for ref in sampled for name, reason in self.quarantined(ref).items()}
        extra = {"quarantine": content_key(sorted(found.items()))} if found else {}
        return self.execute(filtering.task, self.past.step, traces, parameters=found, extra_inputs=extra)

    def _of(self, stage: str) -> tuple[Ref, ...]:
        """Return all work of a stage, in order."""
        return tuple(ref for name, ref in self.work.items() if name.partition(".")[0] == stage)

    @property
    def _traces(self) -> tuple[Ref, ...]:
        return (*self._of("regrade"), *self._of("rollout"))

    @property
    def sampled_so_far(self) -> tuple[Ref, ...]:
        """The assignments and their traces, for the sampler of the next step."""
        return (*self._of("assignment"), *self._traces)

    def _batch(self) -> StepBatch | None:
        if "packing" not in self.work:
            return None
        named = (self.work[name] for name in ("filtering", "advantage", "packing"))
        return StepBatch(self._of("assignment"), self._traces, *named)

    def _train(self, batch: StepBatch | None) -> Policy | None:
        if batch is None or "training" not in self.stages_again or not batch.packing.num_rows("batches"):
            return None
        assert self.policy is not None, "a replay that trains has weights to start from; prepare_replay saw to it"
        self.execute.check_account(batch)
        pipeline.check_gate(self.execute, self.past.step, batch, self.policy)
        self.work["training"], made = pipeline.train(self.execute, self.past.step, batch, self.policy)
        return made


def quarantined_in(store: Store, replay: ReplayConfig) -> Quarantined:
    """Return what looks up which traces a replay leaves out, and why; of rollouts to come none is known to be unfit."""
    if not replay.quarantines:
        return lambda ref: {}
    reasons = store.quarantines.reasons(replay.quarantines)

    def reasons_of(ref: Ref) -> dict[str, str]:
        entry = store.ledger.find(ref.key)
        names = trace_ids(store, entry.slices("traces")) if entry else ()
        return {name: reasons[name] for name in names if name in reasons}

    return reasons_of


def _numbered_refs(stage: str, refs: Sequence[Ref]) -> dict[str, Ref]:
    """Return work of a stage by name, as inputs are named: the second is `stage.1`."""
    return {f"{stage}.{number}" if number else stage: ref for number, ref in enumerate(refs)}

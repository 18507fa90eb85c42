"""Replays recorded steps: their stages again from a chosen one on, over what the stages before it recorded."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from configs.errors import ConfigError
from configs.replay import ORDER, ReplayConfig, StageName, needs_weights, replayed_stages
from configs.run import RunConfig, View
from flows.queries.step_history import RecordedStep, StepHistory, policy_of, step_history, trace_ids
from flows.runtime import pipeline
from flows.runtime.executor import Executor, RolloutSource, StepBatch, assign, sampling_policy
from flows.runtime.resolve_run import Source
from storage.keys import content_key
from storage.store import Store
from tasks.assignment import examples
from tasks.filtering import stage as filtering
from tasks.judging import stage as judging
from tasks.rollout import regrade
from tasks.rollout import stage as rollout
from tasks.runtime.stage import Policy, Ref, ref_of

SCORED = (judging.STAGE.name, regrade.STAGE.name)


def chosen_steps(replay: ReplayConfig, recorded: StepHistory) -> list[RecordedStep]:
    """Return the recorded steps that a replay goes through.

    Raises ConfigError where a step that was asked for was not recorded as far as the replay needs it.
    """
    last = replay.last_step
    whole = {step: past for step, past in recorded.steps.items() if not _lacking(replay, past, recorded)}
    wanted = [step for step in whole if step >= replay.first_step and (last is None or step < last)]
    absent = sorted(set(range(replay.first_step, last or 0)) - whole.keys())
    if absent or not wanted:
        before = _stages_before(replay, recorded)[-1]
        if recorded.refills and replay.from_stage not in ("assignment", "training"):
            before = "packing, which tells that all its groups were sampled"
        raise ConfigError(
            f"replay: run {replay.run!r} has not recorded step {', '.join(map(str, absent)) or replay.first_step} "
            f"up to stage {before}; it has the steps {_ranges(list(whole)) or 'none'}. "
            "Nothing was started; choose among these (--steps), or let the run go on first: "
            f"stagecoach resume {replay.run}"
        )
    return [whole[step] for step in wanted]


def _stages_before(replay: ReplayConfig, recorded: StepHistory) -> list[str]:
    """Return the stages before the first one to be done again, as the run has them."""
    # Examples are of the run and not of a step, but every assignment is made of them.
    before = ORDER[: ORDER.index(replay.from_stage)]
    return ["examples", *(stage for stage in before if stage != "judging" or recorded.has_judges)]


def _lacking(replay: ReplayConfig, past: RecordedStep, recorded: StepHistory) -> list[str]:
    """Return the stages before the first one to be done again that a step did not record.

    Where groups are replaced, a step that was not packed may still lack rollouts; those recorded would be some of them.
    """
    needed = _stages_before(replay, recorded)
    if recorded.refills and replay.from_stage != "assignment":
        needed.append("packing")
    return [stage for stage in needed if stage not in past.work]


def _ranges(steps: Sequence[int]) -> str:
    """Return step numbers as ranges whose ends are not in them, as --steps takes them."""
    starts = [step for step in steps if step - 1 not in steps]
    ends = [step + 1 for step in steps if step + 1 not in steps]
    return ", ".join(f"{start}:{end}" for start, end in zip(starts, ends, strict=True))


def replay_steps(execute: Executor, source: Source, store: Store) -> Iterator["ReplayedStep"]:
    """Walk the chosen steps of the executor's replay and yield each that is done.

    With `replay.policies` "own" each step starts from the policy that the replay made before; the first one, and with
    "recorded" every one, starts from the recorded policy. A batch that is empty is not trained on.
    """
    config, replay = execute.config, execute.config.replay
    recorded = step_history(store, replay.run)
    quarantined = store.quarantines.reasons(replay.quarantines) if replay.quarantines else {}
    policy: Policy | None = None
    previous: Policy | None = None
    credits: Ref | None = None
    earlier: tuple[Ref, ...] = ()
    for past in chosen_steps(replay, recorded):
        if credits is None and config.stateful and (work := recorded.credits_before(past.step)):
            credits = ref_of(work.entry, computed=False)  # of a step before the replay, and no part of it
        earlier = _sampled_before(config, recorded, past, earlier)
        if policy is None or replay.policies == "recorded":
            policy = _first_policy(execute, source, past)
            previous = policy if replay.weights else recorded.sampler(past) or policy
        # A run that samples ahead sampled with the policy before, as the recorded steps did.
        lags = config.rollout.max_off_policy_steps or replay.policies == "recorded"
        sampler = previous if lags else policy
        scorer = sampler if "rollout" in replayed_stages(replay) else recorded.sampler(past)
        step = ReplayedStep(execute, store, quarantined, past, policy, sampler, scorer, credits, earlier).run()
        yield step
        credits, earlier = step.work.get("advantage"), (*step.of("assignment"), *step.traces)
        policy, previous = step.policy or policy, policy


def _first_policy(execute: Executor, source: Source, past: RecordedStep) -> Policy | None:
    """Return the policy that a step starts from: the recorded one, or that of `model.path`."""
    replay = execute.config.replay
    if not needs_weights(replay):
        return None
    if replay.weights:
        return replace(pipeline.first_policy(execute, source), version=past.step)
    return policy_of(past.policy, past.step) if past.policy else None


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
        state = [
            work for stage in ("assignment", "judging", "regrade", "rollout") for work in before.of(stage).values()
        ]
    return tuple(ref_of(work.entry, computed=False) for work in state)


@dataclass
class ReplayedStep:
    """One recorded step again: results before the first repeated stage are shared, the others computed."""

    execute: Executor
    store: Store
    quarantined: Mapping[str, str]
    """The reasons by trace id of the rollouts that the replay excludes."""
    past: RecordedStep
    policy_in: Policy | None
    """The policy that the step begins with."""
    sampler: Policy | None
    """The policy that samples, if rollouts are sampled again."""
    scorer: Policy | None
    """The policy that sampled the rollouts, which scores them where an algorithm wants that; None if unknown."""
    credits: Ref | None
    """The credits of the step before, whose state estimators continue."""
    earlier: tuple[Ref, ...]
    """The assignments and rollouts of the step before, whose state samplers continue."""
    work: dict[str, Ref] = field(default_factory=dict)
    """The results by stage, shared and computed; the second of a stage is `rollout.1`."""
    policy: Policy | None = None
    """The policy that the step made; None where it did not train."""

    def __post_init__(self) -> None:
        self.step, self._config = self.past.step, self.execute.config
        self._again = replayed_stages(self._config.replay)

    @property
    def traces(self) -> tuple[Ref, ...]:
        """The judged rollouts, then the regraded ones, then all rollouts."""
        return (*self.of("judging"), *self.of("regrade"), *self.of("rollout"))

    @property
    def batch(self) -> StepBatch | None:
        """The results up to packed batches; None where the replay ends before them."""
        if "packing" not in self.work:
            return None
        named = (self.work[name] for name in ("filtering", "advantage", "packing"))
        return StepBatch(self.of("assignment"), self.traces, *named)

    def of(self, stage: str) -> tuple[Ref, ...]:
        """Return all results of a stage, in order."""
        return tuple(ref for name, ref in self.work.items() if name.partition(".")[0] == stage)

    def run(self) -> "ReplayedStep":
        """Share or compute every stage; return the step."""
        # Examples are listed again where they are to be those of other environments' settings.
        settings = View(self._config, examples.task.stage.sections, "examples").content()
        changed = "assignment" in self._again and settings != dict(self.past.work["examples"].entry.section)
        self.work["examples"] = self.execute(examples.task, 0) if changed else self._share("examples")
        # Groups are replaced by the credits of those sampled, so the stages between repeat together.
        if self._config.assignment.refill and {"assignment", "advantage"} <= {*self._again}:
            self._refill()
        else:
            self._run_in_turn()
        self._stage("packing", self._pack)
        batch = self.batch
        if batch and "training" in self._again and batch.packing.num_rows("batches"):
            self._train(batch)
        if self.traces:  # assignments alone have no metrics
            early = (*self.of("assignment"), *self.traces, *self.of("filtering"), *self.of("advantage"))
            measured = (*(batch.refs if batch else early), *self.of("training"))
            self.work["metrics"] = pipeline.write_metrics(self.execute, self.step, measured)
        return self

    def _run_in_turn(self) -> None:
        """Run the stages up to the advantages, over as many assignments as were recorded."""
        self._stage("assignment", self._assign)
        self._stage("rollout", self._sample)
        if self._config.replay.regrade:
            refs, digest = (*self.of("rollout"), self.work["examples"]), {"graders": self._config.replay.graders}
            self.work["regrade"] = self.execute(regrade.task, self.step, refs, extra_inputs=digest)
        elif "rollout" not in self._again:
            self._share_recorded("regrade")
        if self._config.replay.regrade:
            self._add("judging", self._judge())
        else:
            self._stage("judging", self._judge)
        self._stage("filtering", lambda: [self._filter(self.traces)])
        if "advantage" not in self._again:
            self._share_recorded("reference")
        self._stage("advantage", lambda: [self._credit(self.traces)])

    def _refill(self) -> None:
        """Sample again, with groups in place of those with zero advantage: as many as are missing now."""
        rollouts = RolloutSource(self.execute, self.work["examples"])
        sample = partial(rollouts.sample, self.step, policy=self.sampler)
        assigned, sampled, (_, credits) = pipeline.sample_groups(
            rollouts, self.step, self.earlier, sample, self._filter_and_credit
        )
        self._add("assignment", assigned)
        self._add("judging", [ref for ref in sampled if ref.stage == judging.STAGE.name])
        self._add("rollout", [ref for ref in sampled if ref.stage != judging.STAGE.name])
        self.work["advantage"] = credits

    def _filter_and_credit(self, traces: tuple[Ref, ...]) -> tuple[Ref, Ref]:
        self.work["filtering"] = self._filter(traces)
        return self.work["filtering"], self._credit(traces)

    def _stage(self, stage: StageName, compute: Callable[[], Sequence[Ref]]) -> None:
        """Compute a stage or share its recorded results; neither where it lies behind the end of the replay."""
        if stage in self._again:
            self._add(stage, compute())
        elif ORDER.index(stage) < ORDER.index(self._config.replay.from_stage):
            self._share_recorded(stage)

    def _add(self, stage: str, refs: Sequence[Ref]) -> None:
        self.work |= {f"{stage}.{number}" if number else stage: ref for number, ref in enumerate(refs)}

    def _share_recorded(self, stage: str) -> None:
        self.work |= {name: self._share(name) for name in self.past.of(stage)}

    def _share(self, name: str) -> Ref:
        return self.execute.share(self.past.work[name].entry, self.past.work[name].step)

    def _assign(self) -> list[Ref]:
        """Assign again what was recorded: a later batch than the first where that was trained on, or several."""
        refs: list[Ref] = []
        for inputs in [work.inputs for work in self.past.of("assignment").values()] or [{}]:
            groups = json.loads(inputs["groups"]) if "groups" in inputs else None
            batch = int(inputs.get("batch", "0"))
            refs.append(assign(self.execute, self.step, self.work["examples"], batch, refs or self.earlier, groups))
        return refs

    def _sample(self) -> list[Ref]:
        policy, inputs = sampling_policy(self.sampler, self._config), self.work["examples"]
        return [self.execute(rollout.task, self.step, (ref, inputs), policy) for ref in self.of("assignment")]

    def _judge(self) -> list[Ref]:
        """Judge again: what was scored again as one, else the rollouts of each assignment."""
        regraded, sampled = self.of("regrade"), self.of("rollout")
        sources = [(*regraded, *sampled)] if regraded else [(ref,) for ref in sampled]
        judges, examples = self._config.judges, self.work["examples"]
        return [self.execute(judging.task, self.step, (*refs, examples)) for refs in sources] if judges else []

    def _filter(self, traces: Sequence[Ref]) -> Ref:
        """Filter; a step without excluded rollouts keeps the key that it has without a quarantine."""
        # Scored rollouts have the traces that were sampled; of rollouts to come none is known to be unfit.
        sampled = [ref for ref in traces if ref.stage not in SCORED] if self.quarantined else []
        entries = [entry for ref in sampled if (entry := self.store.ledger.find(ref.key))]
        names = [name for entry in entries for name in trace_ids(self.store, entry.slices("traces"))]
        unfit = {name: self.quarantined[name] for name in names if name in self.quarantined}
        extra = {"quarantine": content_key(sorted(unfit.items()))} if unfit else {}
        return self.execute(filtering.task, self.step, traces, parameters=unfit, extra_inputs=extra)

    def _credit(self, traces: tuple[Ref, ...]) -> Ref:
        verdicts = self.work["filtering"]
        return pipeline.credit(self.execute, self.step, traces, verdicts, self.credits, self.scorer)

    def _pack(self) -> list[Ref]:
        return [pipeline.pack(self.execute, self.step, self.traces, self.work["filtering"], self.work["advantage"])]

    def _train(self, batch: StepBatch) -> None:
        assert self.policy_in is not None, "a replay that trains has weights to start from; prepare_replay saw to it"
        self.execute.check_account(batch)
        pipeline.check_gate(self.execute, self.step, batch, self.policy_in)
        self.work["training"], self.policy = pipeline.train(self.execute, self.step, batch, self.policy_in)

"""Step history: which stage results belong to which step of a run, out of the ledger alone.

A step may have been sampled more than once: every batch was empty, groups were refilled, or a stage was done again
under another version, whose keys are others. One rule says which of it is the step: what was trained last, else what
was judged last, and of that what was credited, and then packed, last. Whatever asks for the work of a step asks here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from typing import Any

from storage.keys import canonical_json
from storage.read.lineage import Graph, Work
from storage.refs import Slice
from storage.store import Store
from tasks.runtime.stage import Policy
from tasks.stages import LINEAGE, ROLLOUT, SAMPLING, STEP_STAGES, role_of, scores_policy

TABLE_ORDER = ("traces", "verdicts", "samples", "batches", "updates")
"""The tables on the way from rollouts into a gradient: each is made of the one before."""
SEVERAL = ("assignment", ROLLOUT, "judging")
"""Stages of which a step has several results where groups were refilled; the second is named `rollout.1`."""
OF_STEPS = tuple(role for role in LINEAGE if role in STEP_STAGES)
"""The stages of a lineage whose work is of a step; examples are of the run."""
# Before every age: work that never came as far as a stage sorts before work that did.
NEVER = (datetime.min.replace(tzinfo=UTC), "")


@dataclass(frozen=True)
class StepLineage:
    """What one batch of rollouts of a run went through, as far as it is done."""

    run: str
    traces: Work
    verdicts: Work | None = None
    samples: Work | None = None
    batches: Work | None = None
    updates: Work | None = None
    decision: Work | None = None
    """The last decision at a gate about the batch."""

    @property
    def for_training(self) -> bool:
        """False of rollouts that score a policy."""
        return not scores_policy(self.traces.inputs)

    @property
    def works(self) -> tuple[Work | None, ...]:
        """The work from sampling to training, None for what is not done."""
        return self.traces, self.verdicts, self.samples, self.batches, self.decision, self.updates


class RecordedStep:
    """The work of one step of a run that belongs together, as far as it is done."""

    def __init__(self, history: "StepHistory", step: int, last: Work | None = None) -> None:
        self.step = step
        self._history = history
        self._last = last

    @cached_property
    def work(self) -> Mapping[str, Work]:
        """Finished work by stage, named as replays name it, in order; an unfinished step lacks the last ones."""
        return self._history.batch_behind(self._last) if self._last else {}

    def of(self, stage: str) -> dict[str, Work]:
        """Return all work of a stage by name, in order: several where groups of the step were refilled."""
        return {name: work for name, work in self.work.items() if name.partition(".")[0] == stage}

    @cached_property
    def policy(self) -> Work | None:
        """The work that made the policy which the step trained, or would have; None where weights never came in."""
        return self._history.policy_before(self._last) if self._last else None

    @cached_property
    def lineages(self) -> tuple[StepLineage, ...]:
        """What its rollouts went through; before any are finished, those that are committed in part count.

        Of several pieces the last one's lineage stands for all: they were judged together.
        """
        every = self._history.lineages_by_step.get(self.step, [])
        keys = [work.key for stage in (ROLLOUT, "regrade", "judging") for work in self.of(stage).values()]
        # As soon as some rollouts are finished, those in part are of the next refill or of a batch that was given up.
        if not keys:
            return tuple(lineage for lineage in every if not lineage.traces.finished)
        own = [lineage for lineage in every if lineage.traces.key in keys]
        return tuple(sorted(own, key=lambda lineage: keys.index(lineage.traces.key)))

    @property
    def traces(self) -> tuple[Work, ...]:
        """The rollouts, as they were scored last; several pieces where groups were refilled."""
        return tuple(lineage.traces for lineage in self.lineages)

    @property
    def batches(self) -> Work | None:
        """The packing."""
        return self.work.get("packing")

    @property
    def updates(self) -> Work | None:
        """The training."""
        return self.work.get("training")

    @cached_property
    def decision(self) -> Work | None:
        """The last decision at a gate about the batch."""
        return self._history.decision_about(self.batches)

    @cached_property
    def metrics(self) -> Work | None:
        """The metrics of the step as it was done last; None until they are written, which is last."""
        return self._history.metrics_of(self.lineages[-1]) if self.lineages else None

    @property
    def finished(self) -> bool:
        """Whether the step is finished as far as it goes: then its metrics are written."""
        return self.metrics is not None

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """All of the step's work that the run uses, in order of time; examples are of the run."""
        used = self._history.own.works
        own = [work for name, work in self.work.items() if name.partition(".")[0] in OF_STEPS and work.key in used]
        return tuple(sorted(present(*own, *self.traces, self.decision, self.metrics), key=_age))


class StepHistory:
    """The work of one run, step by step. A look at a moment: what is committed later is seen by another one."""

    def __init__(
        self,
        graph: Graph,
        run: str,
        source: "StepHistory | None" = None,
        trains_along: bool = False,
        refills: bool = False,
        has_judges: bool = False,
    ) -> None:
        self.run = run
        self.has_judges = has_judges
        """Whether judges score the rollouts of each step."""
        self.refills = refills
        """Whether the run refilled groups: then only packing says that a step has all its rollouts."""
        self._graph = graph
        """All work of the store: rows of others may be all that is left of work that a run shares."""
        self._source = source
        """What a replay went through again: its steps that it did not train start from policies of that run."""
        self._trains_along = trains_along
        """Whether a replay trained each step from the policy that it made before."""

    @cached_property
    def own(self) -> Graph:
        """The part of the graph that the run uses."""
        return self._graph.of_run(self.run)

    @cached_property
    def steps(self) -> dict[int, RecordedStep]:
        """The steps by number, in order, with the work that counts of each; unfinished ones as far as they are."""
        by_step: dict[int, list[Work]] = {}
        for work in self._of_steps:
            by_step.setdefault(work.step, []).append(work)
        return {step: RecordedStep(self, step, self._last(works)) for step, works in sorted(by_step.items())}

    @cached_property
    def sampled_steps(self) -> list[RecordedStep]:
        """The steps that have rollouts, in order; of some nothing may be finished yet."""
        begun = {step: RecordedStep(self, step) for step in self.lineages_by_step}
        return [step for _, step in sorted((begun | self.steps).items()) if step.lineages]

    @cached_property
    def lineages(self) -> list[StepLineage]:
        """The outcome of every batch of rollouts that the run uses, evaluations included, by step.

        The way that was trained counts, of several the one trained last; else the last work of each stage. A batch that
        was packed again and then held back, or not trained yet, makes nothing untrained. Rollouts that were scored
        again are represented by the work that scored them last.
        """
        return [self.lineage(work) for work in self.rollouts]

    @cached_property
    def rollouts(self) -> list[Work]:
        """The work that made every batch of rollouts that the run uses, evaluations included, by step."""
        again = self.own.users
        return [work for work in self.own.makers("traces") if not again(work, "traces", made="traces")]

    @cached_property
    def lineages_by_step(self) -> dict[int, list[StepLineage]]:
        """The outcomes of the rollouts of each step, replaced batches included; of evaluations nothing."""
        by_step: dict[int, list[StepLineage]] = {}
        for lineage in self.lineages:
            if lineage.for_training:
                by_step.setdefault(lineage.traces.step, []).append(lineage)
        return by_step

    @property
    def evaluations(self) -> list[Work]:
        """The rollouts that score a policy; the step of each is the policy's version."""
        return [lineage.traces for lineage in self.lineages if not lineage.for_training]

    @property
    def first_policy(self) -> Work | None:
        """The work that brought in the weights that the run started from, None where it had none."""
        imports = [work for work in self._finished if work.stage == "policy_import"]
        return min(imports, key=lambda work: (work.step, work.age), default=None)

    def batch(self, step: int) -> tuple[Work, Work | None] | None:
        """Return the packing of a step that was trained last, or else the last one, with its training.

        Unlike the step's work it is there while the next batch of a step, whose first was empty, is on its way.
        """
        packed = [work for work in self.own.makers("batches") if work.step == step]
        trained = [(work, made) for work in packed for made in self.own.users(work, "batches", made="updates")]
        if trained:
            return max(trained, key=lambda pair: pair[1].age)
        return (max(packed, key=_age), None) if packed else None

    def sampler(self, past: RecordedStep) -> Policy | None:
        """Return the policy that sampled a step's rollouts; None where none of the store did."""
        work = self.find(past.work[ROLLOUT].inputs.get("policy")) if ROLLOUT in past.work else None
        return policy_of(work, 0) if work else None

    def state_of(self, assigned: Work) -> list[Work]:
        """Return the work that an assignment knows from which examples are hard: an earlier one, and its rollouts."""
        names = [name for name in assigned.inputs if name.partition(".")[0] in (*SEVERAL, "regrade")]
        return present(*(self.find(assigned.inputs[name]) for name in sorted(names, key=_number)))

    def credits_before(self, step: int) -> Work | None:
        """Return the credits from whose state those of a step go on: as its own did, or else those of the step before.

        Those of a replay's first step are of the run that it went through again, and no step of its own.
        """
        own, earlier = (
            self.steps[number].work.get("advantage") if number in self.steps else None for number in (step, step - 1)
        )
        return self.find(own.inputs["advantage"]) if own and "advantage" in own.inputs else earlier

    def judged_before(self, step: int) -> Iterator[Work]:
        """Yield the filterings whose kept rollouts are in the state that a step's credits go on from, last first."""
        credits = self.credits_before(step)
        while credits is not None:
            yield from present(self.find(credits.inputs["filtering"]))
            credits = self.find(credits.inputs.get("advantage"))

    def work_behind(self, last: Work, number: str = "") -> dict[str, Work]:
        """Return the work that `last` was made of, itself included, by role; `number` is that of an assignment's.

        Only what comes before it on the way through a step: from other work of its stage, or from rollouts that say
        which examples to try, it has a state.
        """
        role = role_of(last.stage)
        behind = {f"{role}{number}" if role in SEVERAL else role: last}
        for name, key in last.inputs.items():
            stage, dot, other = name.partition(".")
            # Later stages name rollouts or credits of earlier steps too, from which they have a state: these are not
            # behind it.
            if role_of(stage) in LINEAGE[: LINEAGE.index(role)] and (work := self.find(key)) is not None:
                behind = self.work_behind(work, dot + other or number) | behind
        return behind

    def batch_behind(self, last: Work) -> dict[str, Work]:
        """Return the work of the batch that `last` is the last work of, by name, in order.

        Refills are known by what was judged together. Until then the last assignment names those that it refills.
        """
        refill = self._refill(last)
        found = self.work_behind(last, f".{refill}" if refill else "")
        for number in (f".{place}" if place else "" for place in range(refill)):
            if earlier := self.find(found[f"assignment.{refill}"].inputs[f"assignment{number}"]):
                found[f"assignment{number}"] = earlier
                sampled = [work for work in self.own.children(earlier.key) if work.finished and work.stage in SAMPLING]
                found |= {f"{ROLLOUT}{number}": max(sampled, key=_age)} if sampled else {}
                judged = self.own.users(max(sampled, key=_age), "traces", made="judgements") if sampled else []
                found |= {f"judging{number}": max(judged, key=_age)} if judged else {}
        order = sorted(found, key=lambda name: (LINEAGE.index(name.partition(".")[0]), _number(name)))
        return {name: found[name] for name in order}

    def _refill(self, work: Work) -> int:
        """Return which refill of its batch some assigned or sampled work is; 0 for none, and for what was judged."""
        assigned = self.work_behind(work).get("assignment") if role_of(work.stage) in SEVERAL else None
        if assigned is None or "groups" not in assigned.inputs:
            return 0
        return sum(name.partition(".")[0] == "assignment" for name in assigned.inputs)

    def policy_before(self, last: Work) -> Work | None:
        """Return the work that made the policy from which a step whose last work this is was, or would be, trained."""
        if last.stage == "training":
            return self.find(last.inputs["policy"])
        # A step that was not trained would have gone on from the last policy before it.
        made = [work for work in self._of_steps if work.stage == "training" and work.step < last.step]
        if made and (self._source is None or self._trains_along):
            return max(made, key=lambda work: (work.step, work.age))
        if self.first_policy or self._source is None:
            return self.first_policy
        # The policy of the recorded run that a replay's step started from.
        begun = min(work.step for work in self._of_steps) if self._trains_along else last.step
        past = self._source.steps.get(begun)
        return past.policy if past else None

    def decision_about(self, batches: Work | None) -> Work | None:
        """Return the last decision at a gate about a batch."""
        decisions = self.own.users(batches, "batches", made="decisions") if batches else []
        return max(decisions, key=_age, default=None)

    def metrics_of(self, lineage: StepLineage) -> Work | None:
        """Return the metrics of a step whose rollouts went a way; None where they are not written."""
        *_, last = [work for work in lineage.works if work is not None and "decisions" not in work.tables]
        written = [work for work in self.own.children(last.key) if work.finished and "metrics" in work.tables]
        return max(written, key=_age, default=None)

    def find(self, key: str | None) -> Work | None:
        """Return the finished work of a key, of whatever run; None where there is none."""
        work = self._graph.works.get(key or "")
        return work if work is not None and work.finished else None

    @cached_property
    def _finished(self) -> list[Work]:
        return [work for work in self.own.works.values() if work.finished and not scores_policy(work.inputs)]

    @cached_property
    def _of_steps(self) -> list[Work]:
        return [work for work in self._finished if role_of(work.stage) in OF_STEPS]

    def _last(self, works: list[Work]) -> Work:
        """Return, of all finished work of a step, the one that what belongs to the step was done up to."""
        trained = [work for work in works if work.stage == "training"]
        return max(trained, key=_age) if trained else max(works, key=self._progress)

    def _progress(self, work: Work) -> tuple[Any, ...]:
        """Return what orders work of a step that was not trained: judged last, credited last, packed last."""
        behind = self.work_behind(work)
        # What was judged last counts, even where older work came further: it stands for the newest rollouts.
        ages = [behind[role].age if role in behind else NEVER for role in ("filtering", "advantage", "packing")]
        return *ages, LINEAGE.index(role_of(work.stage)), self._refill(work), work.age

    def lineage(self, traces: Work) -> StepLineage:
        """Return what some rollouts went through, as `lineages` has it; who asks about one needs no others."""
        if scores_policy(traces.inputs):
            return StepLineage(self.run, traces)
        # Several ways where a stage was done again under another version: each training is an end of one.
        ways: list[tuple[Work, ...]] = [(traces,)]
        latest = [traces]
        for place, (table, made) in enumerate(pairwise(TABLE_ORDER)):
            ways = [(*way, work) for way in ways for work in self.own.users(way[-1], table, made=made)]
            # Without a training the last work of each stage counts, as far as there is any.
            users = self.own.users(latest[-1], table, made=made) if len(latest) > place else []
            latest += [max(users, key=_age)] if users and made != "updates" else []
        way = max(ways, key=lambda way: way[-1].age, default=tuple(latest))
        later: list[Work | None] = [*way[1:], *[None] * (len(TABLE_ORDER) - len(way))]
        verdicts, samples, batches, updates = later
        return StepLineage(self.run, way[0], verdicts, samples, batches, updates, self.decision_about(batches))


def step_history(store: Store, run: str, graph: Graph | None = None) -> StepHistory:
    """Return the history of a run; of a replay, with the run that it went through again behind it.

    `graph` holds all work of the store; who asks for many runs builds it once. Raises ConfigError for a config that is
    not of this version.
    """
    # The sections of configs take their time to import, and most questions about rows need none of them.
    from configs.load import from_json
    from configs.replay import replayed_stages

    graph = graph or Graph(store.counted_entries())
    config = from_json(canonical_json(store.runs.config(run)))
    stages = {*replayed_stages(config.replay)}
    refills = config.assignment.refill and (config.kind == "train" or {"assignment", "advantage", "packing"} <= stages)
    if config.kind != "replay" or config.replay.run not in store.runs.names():
        return StepHistory(graph, run, refills=refills, has_judges=bool(config.judges))
    trains_along = config.replay.policies == "own" and "training" in stages
    # A replay may be of a replay: its source has a source of its own.
    source = step_history(store, config.replay.run, graph)
    return StepHistory(graph, run, source, trains_along, refills, bool(config.judges))


def present(*works: Work | None) -> list[Work]:
    """Return the work that there is, each once, in order."""
    return list({work.key: work for work in works if work is not None}.values())


def policy_of(work: Work, step: int) -> Policy:
    """Return the policy that finished work of training or import made; weights that came in are those of `step`."""
    return Policy(work.key, work.step + 1 if work.stage == "training" else step)


def trace_ids(store: Store, slices: Sequence[Slice]) -> list[str]:
    """Return the ids of the traces in some slices."""
    return [str(name) for name in store.read(slices, ["trace_id"])["trace_id"].to_pylist()]


def _age(work: Work) -> tuple[datetime, str]:
    return work.age


def _number(name: str) -> int:
    """Return which one of its stage some work is, by its name: `rollout.1` is the second."""
    return int(name.partition(".")[2] or 0)

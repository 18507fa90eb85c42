"""Step history: which stage results belong to which step of a run, out of the ledger alone.

A step may have been sampled more than once: every batch was empty, groups were refilled, or a stage was done again
under another version, whose keys are others. One rule says which of it is the step: what was trained last, else what
was judged last, and of that what was credited, and then packed, last. Whatever asks for the work of a step asks here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from typing import Any

from storage.keys import canonical_json
from storage.read.lineage import Graph, Work, row_identities
from storage.refs import Slice
from storage.store import Store
from tasks.runtime.stage import Policy
from tasks.stages import LINEAGE, ROLLOUT, SAMPLING, STEP_STAGES, role_of, scores_policy

TABLE_ORDER = ("traces", "verdicts", "samples", "batches", "updates")
"""The tables on the way from rollouts into a gradient: each is made of the one before."""
SEVERAL = ("assignment", ROLLOUT)
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
    earlier: tuple["StepLineage", ...] = ()
    """The other ways on which the run trained on these rollouts, before a stage was done again; the last first."""

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
        # As soon as some rollouts are finished, those in part are of the next refill or of a batch that was given up.
        if not (self.of(ROLLOUT) or self.of("regrade")):
            return tuple(each for each in every if not each.traces.finished)
        keys = [work.key for work in (*self.of(ROLLOUT).values(), *self.of("regrade").values())]
        return tuple(sorted((e for e in every if e.traces.key in keys), key=lambda each: keys.index(each.traces.key)))

    @property
    def traces(self) -> tuple[Work, ...]:
        """The rollouts, as they were scored last; several pieces where groups were refilled."""
        return tuple(each.traces for each in self.lineages)

    @property
    def verdicts(self) -> Work | None:
        """The filtering of all rollouts."""
        return self.work.get("filtering")

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
        return self._history.decision_about(self.batches) if self.batches else None

    @cached_property
    def metrics(self) -> Work | None:
        """The metrics of the step as it was done last; None until they are written, which is last."""
        return self._history.metrics_of(self.lineages[-1]) if self.lineages else None

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """All of the step's work that the run uses, in order of time; examples are of the run."""
        used = self._history.own.works
        own = [work for name, work in self.work.items() if name.partition(".")[0] in OF_STEPS and work.key in used]
        every = [*own, *self.traces, *(work for work in (self.decision, self.metrics) if work)]
        return tuple(sorted({work.key: work for work in every}.values(), key=lambda work: work.age))

    @cached_property
    def by_stage(self) -> dict[str, list[Work]]:
        """The finished work of the step by the stages that did it, in order."""
        found: dict[str, list[Work]] = {stage: [] for stage in STEP_STAGES}
        for work in self.works:
            if work.finished and work.stage in found:
                found[work.stage].append(work)
        return {stage: works for stage, works in found.items() if works}

    @property
    def finished(self) -> bool:
        """Whether the step is finished as far as it goes: then its metrics are written."""
        return self.metrics is not None

    @property
    def name(self) -> tuple[str, ...]:
        """What the rollouts and their verdicts are known by: another as soon as there are more of them."""
        return row_identities((*self.traces, self.verdicts))


class StepHistory:
    """The work of one run, step by step. A look at a moment: what is committed later is seen by another one."""

    def __init__(
        self,
        graph: Graph,
        run: str,
        source: "StepHistory | None" = None,
        trains_along: bool = False,
        refills: bool = False,
    ) -> None:
        self.run = run
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
        found: dict[int, list[Work]] = {}
        for work in self._of_steps:
            found.setdefault(work.step, []).append(work)
        return {step: RecordedStep(self, step, self._last(works)) for step, works in sorted(found.items())}

    @cached_property
    def sampled_steps(self) -> list[RecordedStep]:
        """The steps that have rollouts, in order; of some nothing may be finished yet."""
        begun = {step: RecordedStep(self, step) for step in self.lineages_by_step}
        return [step for _, step in sorted((begun | self.steps).items()) if step.lineages]

    @cached_property
    def lineages(self) -> list[StepLineage]:
        """The outcome of every batch of rollouts that the run uses, evaluations included, by step.

        The way that was trained counts, of several the one trained last; else the last work of each stage. A batch that
        was packed again and then held back, or not trained yet, makes nothing untrained.
        """
        return [self.lineage(work) for work in self.rollouts]

    @cached_property
    def rollouts(self) -> list[Work]:
        """The work that made every batch of rollouts that the run uses, evaluations included, by step.

        Rollouts that were scored again are represented by the work that scored them last.
        """
        again = self.own.users
        return [work for work in self.own.makers("traces") if not again(work, "traces", made="traces")]

    @cached_property
    def lineages_by_step(self) -> dict[int, list[StepLineage]]:
        """The outcomes of the rollouts of each step, replaced batches included; of evaluations nothing."""
        found: dict[int, list[StepLineage]] = {}
        for each in self.lineages:
            if each.for_training:
                found.setdefault(each.traces.step, []).append(each)
        return found

    @property
    def evaluations(self) -> list[Work]:
        """The rollouts that score a policy; the step of each is the policy's version."""
        return [each.traces for each in self.lineages if not each.for_training]

    @property
    def first_policy(self) -> Work | None:
        """The work that brought in the weights that the run started from, None where it had none."""
        found = [work for work in self._finished if work.stage == "policy_import"]
        return min(found, key=lambda work: (work.step, work.age), default=None)

    def batch(self, step: int) -> tuple[Work, Work | None] | None:
        """Return the packing of a step that was trained last, or else the last one, with its training.

        Unlike the step's work it is there while the next batch of a step, whose first was empty, is on its way.
        """
        packed = [work for work in self.own.makers("batches") if work.step == step]
        trained = [(work, made) for work in packed for made in self.own.users(work, "batches", made="updates")]
        if trained:
            return max(trained, key=lambda pair: pair[1].age)
        return (max(packed, key=lambda work: work.age), None) if packed else None

    def sampler(self, past: RecordedStep) -> Policy | None:
        """Return the policy that sampled a step's rollouts; None where none of the store did."""
        key = past.work[ROLLOUT].inputs.get("policy") if ROLLOUT in past.work else None
        work = self.find(key) if key else None
        return policy_of(work, 0) if work else None

    def state_of(self, assigned: Work) -> list[Work]:
        """Return the work that an assignment knows from which examples are hard: an earlier one, and its rollouts."""
        names = [name for name in assigned.inputs if name.partition(".")[0] in (*SEVERAL, "regrade")]
        found = (self.find(assigned.inputs[name]) for name in sorted(names, key=_number))
        return [work for work in found if work is not None]

    def credits_before(self, step: int) -> Work | None:
        """Return the credits from whose state those of a step go on: as its own did, or else those of the step before.

        Those of a replay's first step are of the run that it went through again, and no step of its own.
        """
        own, earlier = self._credits(step), self._credits(step - 1)
        key = own.inputs.get("advantage") if own else None
        return self.find(key) if key else earlier

    def judged_before(self, step: int) -> Iterator[Work]:
        """Yield the filterings whose kept rollouts are in the state that a step's credits go on from, last first."""
        credits = self.credits_before(step)
        while credits is not None:
            if (judged := self.find(credits.inputs["filtering"])) is not None:
                yield judged
            key = credits.inputs.get("advantage")
            credits = self.find(key) if key else None

    def work_behind(self, last: Work, number: str = "") -> dict[str, Work]:
        """Return the work that `last` was made of, itself included, by role; `number` is that of an assignment's.

        Only what comes before it on the way through a step: from other work of its stage, or from rollouts that say
        which examples to try, it has a state.
        """
        role = role_of(last.stage)
        found = {f"{role}{number}" if role in SEVERAL else role: last}
        before = LINEAGE[: LINEAGE.index(role)]
        for name, key in last.inputs.items():
            stage, dot, other = name.partition(".")
            # Later stages name rollouts or credits of earlier steps too, from which they have a state: these are not
            # behind it.
            if role_of(stage) in before and (work := self.find(key)) is not None:
                found = self.work_behind(work, dot + other or number) | found
        return found

    def batch_behind(self, last: Work) -> dict[str, Work]:
        """Return the work of the batch that `last` is the last work of, by name, in order.

        Refills are known by what was judged together. Until then the last assignment names those that it refills.
        """
        number = self._refill(last)
        found = self.work_behind(last, f".{number}" if number else "")
        for place in range(number):
            if (
                earlier := self.find(found[f"assignment.{number}"].inputs[_numbered_name("assignment", place)])
            ) is not None:
                found[_numbered_name("assignment", place)] = earlier
                sampled = [each for each in self.own.children(earlier.key) if each.finished and each.stage in SAMPLING]
                if sampled:
                    found[_numbered_name(ROLLOUT, place)] = max(sampled, key=lambda work: work.age)
        return {name: found[name] for name in sorted(found, key=_place)}

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
        return self.first_policy or self._of_source(last.step)

    def decision_about(self, batches: Work) -> Work | None:
        """Return the last decision at a gate about a batch."""
        return max(self.own.users(batches, "batches", made="decisions"), key=lambda work: work.age, default=None)

    def metrics_of(self, lineage: StepLineage) -> Work | None:
        """Return the metrics of a step whose rollouts went a way; None where they are not written."""
        made = [
            work for work in (lineage.traces, *lineage.works) if work is not None and "decisions" not in work.tables
        ]
        written = [work for work in self.own.children(made[-1].key) if work.finished and "metrics" in work.tables]
        return max(written, key=lambda work: work.age, default=None)

    def _of_source(self, step: int) -> Work | None:
        """Return the policy of the recorded run that a replay's step started from."""
        if self._source is None:
            return None
        begun = min(work.step for work in self._of_steps) if self._trains_along else step
        past = self._source.steps.get(begun)
        return past.policy if past else None

    def _credits(self, step: int) -> Work | None:
        past = self.steps.get(step)
        return past.work.get("advantage") if past else None

    def find(self, key: str) -> Work | None:
        """Return the finished work of a key, of whatever run; None where there is none."""
        work = self._graph.works.get(key)
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
        return max(trained, key=lambda work: work.age) if trained else max(works, key=self._progress)

    def _progress(self, work: Work) -> tuple[Any, ...]:
        """Return what orders work of a step that was not trained: judged last, credited last, packed last."""
        behind = self.work_behind(work)
        # What was judged last counts, even where older work came further: it stands for the newest rollouts.
        ages = [behind[role].age if role in behind else NEVER for role in ("filtering", "advantage", "packing")]
        return *ages, LINEAGE.index(role_of(work.stage)), self._refill(work), work.age

    def lineage(self, traces: Work) -> StepLineage:
        """Return what one of `rollouts` went through, as `lineages` has it; who asks about one needs no others."""
        if scores_policy(traces.inputs):
            return StepLineage(self.run, traces)
        trained = sorted(self._ways_to_training(traces), key=lambda way: way[-1].age, reverse=True)
        last, *earlier = (self._along(way) for way in trained or [self._work_without_training(traces)])
        return replace(last, earlier=tuple(earlier))

    def _ways_to_training(self, traces: Work) -> list[tuple[Work, ...]]:
        """Return every way from rollouts to a training: the work that made each table of `TABLE_ORDER`."""
        # Several ways where a stage was done again under another version: each training is an end of one.
        ways: list[tuple[Work, ...]] = [(traces,)]
        for table, made in pairwise(TABLE_ORDER):
            ways = [(*way, work) for way in ways for work in self.own.users(way[-1], table, made=made)]
        return ways

    def _work_without_training(self, traces: Work) -> tuple[Work, ...]:
        """Return the last work of each stage after rollouts, as far as there is any."""
        way = [traces]
        for table, made in pairwise(TABLE_ORDER[:-1]):
            found = self.own.users(way[-1], table, made=made)
            if not found:
                break
            way.append(max(found, key=lambda work: work.age))
        return tuple(way)

    def _along(self, way: tuple[Work, ...]) -> StepLineage:
        found: list[Work | None] = [*way[1:]]
        found += [None] * (len(TABLE_ORDER) - len(way))
        verdicts, credits, batches, updates = found
        decision = self.decision_about(batches) if batches else None
        return StepLineage(self.run, way[0], verdicts, credits, batches, updates, decision)


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
    assigned = config.kind == "train" or {"assignment", "advantage", "packing"} <= {*replayed_stages(config.replay)}
    refills = assigned and config.assignment.refill
    if config.kind != "replay" or config.replay.run not in store.runs.names():
        return StepHistory(graph, run, refills=refills)
    trains_along = config.replay.policies == "own" and "training" in replayed_stages(config.replay)
    # A replay may be of a replay: its source has a source of its own.
    source = step_history(store, config.replay.run, graph)
    return StepHistory(graph, run, source, trains_along, refills)


def present(*works: Work | None) -> list[Work]:
    """Return the work that there is, each once, in order."""
    return list({work.key: work for work in works if work is not None}.values())


def policy_of(work: Work, step: int) -> Policy:
    """Return the policy that finished work of training or import made; weights that came in are those of `step`."""
    return Policy(work.key, work.step + 1 if work.stage == "training" else step)


def trace_ids(store: Store, slices: Sequence[Slice]) -> list[str]:
    """Return the ids of the traces in some slices."""
    return [str(name) for name in store.read(slices, ["trace_id"])["trace_id"].to_pylist()]


def _numbered_name(role: str, number: int) -> str:
    return f"{role}.{number}" if number else role


def _place(name: str) -> tuple[int, int]:
    """Return what orders the names of a step's work."""
    return LINEAGE.index(name.partition(".")[0]), _number(name)


def _number(name: str) -> int:
    """Return which one of its stage some work is, by its name: `rollout.1` is the second."""
    return int(name.partition(".")[2] or 0)

"""Rollout: sample every assigned example with a policy and record the rollouts, group by group.

Reads assignments and examples; writes traces and messages, images with their tensors if any, counters of the engines
with `engine.metrics`, and routed_experts with `training.router_replay`. Where `rollout.max_off_policy_steps` is 2 or
more the groups of a step come from the RolloutQueue of the run, and there are intakes and intake_loads, stale_groups,
and token_policies where weights were exchanged under a rollout. Called in a thread of the run; the queue samples in a
thread of its own.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Self

import pyarrow as pa

from configs.run import View, for_environment
from storage.schemas.stage_tables import GROUPS
from storage.turns import TurnCache
from tasks.arrays.columns import rows_without, texts
from tasks.arrays.group_counts import num_needed, num_wanted
from tasks.inference.engine.client import OF_POLICY, ServedModel
from tasks.inference.engine.metrics import EngineMetrics
from tasks.inference.sampling.crash_isolation import CrashIsolation
from tasks.inference.sampling.limits import SamplingPlan, WeightUpdate
from tasks.inference.sampling.lost_servers import ServiceLost
from tasks.inference.sampling.sampler import BatchSampler
from tasks.inference.sampling.seats import frozen_seat_models
from tasks.rollout.group_rows import concat_groups, stale_rows, taken_rows
from tasks.rollout.queue import GroupTables, RolloutQueue
from tasks.rollout.regrade import RegradeInputs, regrade
from tasks.runtime.parts import Parts
from tasks.runtime.prefect_task import as_task
from tasks.runtime.services import EngineService, EnvironmentService, GraderService, TeacherService, require
from tasks.runtime.stage import Attempt, Policy, Stage, Tables, retry_lost

Put = Callable[[Mapping[str, pa.Table]], None]
"""Takes the rows of a finished group."""


@dataclass(frozen=True)
class RolloutInputs:
    """The assignments of a step, the policy that samples them (the oldest that may, of a queue), and the services."""

    assignments: pa.Table
    examples: pa.Table
    step: int
    policy: Policy | None
    parts: Parts
    engine: EngineService
    environments: EnvironmentService
    teachers: TeacherService
    graders: GraderService
    turns: TurnCache | None = None
    queue: RolloutQueue | None = None
    """The queue that groups are taken from; None where the step samples its own assignments."""
    recorded_inputs: dict[str, str] = field(default_factory=dict)
    """Inputs of the result in the ledger; assignments and policies of groups of the queue are added."""

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        services = attempt.services
        return cls(
            attempt.table("assignments"),
            attempt.table("examples"),
            attempt.step,
            attempt.policy,
            attempt.parts,
            require(services.engine),
            require(services.environments),
            require(services.teachers),
            require(services.graders),
            attempt.turns,
            attempt.parameters,
            attempt.inputs,
        )


def rollout(inputs: RolloutInputs, config: View) -> Tables:
    """Sample what earlier attempts have not committed; a group is safe as soon as it is finished.

    Environments that a teacher samples are sampled by that and not by the policy, which may be None if all are. With
    oversampling, an environment's rollouts end with the groups that are enough; the others are rows that say so.
    A rollout that fails is a row with its error. Only the loss of the engine or of an environment server interrupts
    the stage: it waits until the service is back and samples the groups that are still missing; a rollout that takes
    its server down again when it is alone there is a row with that error. Raises what the services raise when a service
    does not come back. A turn that `turns` has, or takes while this is sampled, is not sampled again.
    """
    if inputs.queue:
        _take_groups(inputs, inputs.queue, config)
        return {}
    count = inputs.parts.put if config.engine.metrics else None
    retry_lost(Runner(config, inputs, inputs.step, inputs.policy, count).sample_missing, ServiceLost)
    return {}


def _take_groups(inputs: RolloutInputs, queue: RolloutQueue, config: View) -> None:
    """Take the groups of the queue that end first, as many as the step's own assignments name; each is safe at once.

    With oversampling they name more than the step takes. Groups that no later step may take are recorded as stale,
    after the groups of the step. Which groups are taken depends on how long rollouts last: the recorded rows decide,
    and a step that is called again takes only the missing groups. Raises what sampling raises.
    """
    step, parts, oldest = inputs.step, inputs.parts, require(inputs.policy)
    groups, stale = parts.finished_units(), {row["group_id"] for row in parts.earlier_rows("stale_groups")}
    done = groups - stale
    size = num_wanted(inputs.assignments, config.oversampling or 1.0)
    sample = QueueSampler(inputs, queue, config).sample
    for place, group in enumerate(queue.pop(step, size, done, sample, stale), len(done)):
        groups.add(group.group_id)
        inputs.recorded_inputs.update(queue.origins(groups, oldest=oldest.version))
        parts.put(taken_rows(group, step, place, config.rollout.max_in_flight))
    if dropped := queue.drop_stale(step):
        groups.update(group.group_id for group in dropped)
        inputs.recorded_inputs.update(queue.origins(groups, oldest=oldest.version))
        # In one part: they are the last rows of the step, and all of them or none are there after a crash.
        parts.put(concat_groups(stale_rows(group, step, oldest, config) for group in dropped))


class QueueSampler(SamplingPlan):
    """Samples for the queue, in its thread, with the services of the step that used the queue first.

    Groups begin with the queue's policy until a newer one is added; see `rollout.weight_update`.
    """

    def __init__(self, inputs: RolloutInputs, queue: RolloutQueue, config: View) -> None:
        super().__init__()
        self._inputs, self._queue, self._config = inputs, queue, config
        self.weight_update, self.meter = config.rollout.weight_update, queue.meter
        if self.weight_update == "keep" or (self.weight_update == "wait" and inputs.turns):
            self.versions = queue.versions
        self._runners: dict[int, Runner] = {}
        """By version of the policy: crashes are counted while it samples."""
        self._counted: list[GroupTables] = []
        """Counters of the engines after the last group of a sampler; they go with the next group."""

    def sample(self, assigned: pa.Table) -> None:
        """Sample assignments with the queue's policy and its successors; returns when the queue is outdated."""
        inputs, policy = self._inputs, self._queue.policy
        count = self._counted.append if self._config.engine.metrics else None
        new = Runner(self._config, inputs, policy.version, policy, count, counts_with_groups=True)
        self._runners.setdefault(policy.version, new).sample_some(assigned, self._put, self)

    def _put(self, rows: GroupTables) -> None:
        self._queue.put(concat_groups([*self._counted, rows]))
        self._counted.clear()

    def is_outdated(self) -> bool:
        return self._queue.is_outdated()

    def begin(self, group_id: str, versions: Collection[int]) -> int:
        return self._queue.begin(group_id, versions)

    def find_dropped(self, groups: Collection[str]) -> Collection[str]:
        return self._queue.find_dropped(groups)

    def update_weights(self) -> WeightUpdate | None:
        """Exchange the engine's policy for the newest one under the rollouts in flight."""
        engine, recompute = self._inputs.engine, self._config.rollout.recompute_states
        updated = self._queue.renew(lambda policy: engine.exchange(policy, recompute=recompute))
        return WeightUpdate(self._queue.policy, *updated) if updated else None


@dataclass(frozen=True)
class Runner:
    """What a stage samples with: its inputs, the step and the policy of the rollouts, and what it knows of crashes."""

    config: View
    inputs: RolloutInputs
    step: int
    policy: Policy | None
    count: Put | None = None
    """Takes what the engines counted while groups were sampled; None where nobody asks."""
    counts_with_groups: bool = False
    """Whether a group brings what was counted before it ended: the groups of a stream are of several steps."""
    isolation: CrashIsolation = field(default_factory=CrashIsolation)

    def sample_missing(self) -> None:
        """Sample the step's assignments until no group is missing; raises as `sample_some` does."""
        oversampling, assigned, parts = self.config.oversampling, self.inputs.assignments, self.inputs.parts
        while (missing := _missing(assigned, parts)).num_rows:
            wanted = _wanted_groups(assigned, missing, oversampling) if oversampling else {}
            self.sample_some(missing, parts.put, SamplingPlan(wanted))

    def sample_some(self, missing: pa.Table, put: Put, plan: SamplingPlan) -> None:
        """Sample missing assignments, those that may crash their server after all others; `put` gets finished groups.

        Raises ServiceLost, unless an isolated rollout was alone: restarts of the server are bounded by its section.
        """
        try:
            self._sample(missing, put, plan)
        except ServiceLost as lost:
            if not lost.is_isolated:
                raise

    def _sample(self, assignments: pa.Table, put: Put, plan: SamplingPlan) -> None:
        inputs = self.inputs
        # A sampler of the queue is given assignments of other environments while it samples.
        assigned = assignments["environment"]
        names = [each.name for each in self.config.environments] if plan.weight_update else [*{*texts(assigned)}]
        # First: it imports for seconds, and an engine may be starting.
        addresses = inputs.environments.addresses({*names})
        served = _frozen(sorted(names), self.config, inputs.teachers)
        with inputs.engine.pinned(self.policy) if self.policy else nullcontext() as model:
            models = {OF_POLICY: model, **served} if model else served
            counted = EngineMetrics(models.values()) if self.count else None

            def put_group(_group_id: str, rows: Mapping[str, pa.Table]) -> None:
                more = counted.take() if counted and self.counts_with_groups else None
                put({**rows, "engine_metrics": more} if more else rows)

            sampler = BatchSampler(
                served=models,
                addresses=addresses,
                policy=self.policy or Policy("", self.step),  # without one, every row is a teacher's
                step=self.step,
                config=self.config,
                on_group=put_group,
                plan=plan,
                isolation=self.isolation,
                turns=inputs.turns,
                find=[inputs.environments.addresses_now, *([inputs.engine.addresses_now] if model else [])],
                load=counted.load if counted else None,
                records_experts=self.config.records_experts,
                score_group=self._score_group if any(each.group_rewards for each in self.config.environments) else None,
            )
            with self._counting(counted):
                sampler.sample(assignments, inputs.examples)

    def _score_group(self, tables: dict[str, pa.Table]) -> dict[str, pa.Table]:
        """Return the tables of a group with the rewards that its environment gives whole groups."""
        traces = tables["traces"]
        rewards = {each.name: each.group_rewards for each in self.config.environments}
        if not rewards[texts(traces["environment"])[0]]:
            return tables
        recorded = traces, tables["messages"], tables.get("images"), self.inputs.graders
        return tables | {"traces": regrade(RegradeInputs(self.inputs.examples, *recorded), self.config)["traces"]}

    @contextmanager
    def _counting(self, counted: EngineMetrics | None) -> Iterator[None]:
        """Hand over what the engines count within the block, also where that fails: a lost engine was at work, too."""
        if counted is None or self.count is None:
            yield
            return
        try:
            with counted.measure():
                yield
        finally:
            if (rows := counted.take()).num_rows:
                self.count({"engine_metrics": rows})


def _wanted_groups(assigned: pa.Table, missing: pa.Table, oversampling: float) -> dict[str, int]:
    """Return how many more groups of each environment are needed; those that are there count, stopped ones among them.

    A group is only ever stopped when enough others are there.
    """
    # Counted afresh at every call: a run that is resumed knows only which groups are committed.
    begun, left = _num_groups(assigned), _num_groups(missing)
    return {name: num_needed(count, oversampling) - (count - left[name]) for name, count in begun.items()}


def _num_groups(assignments: pa.Table) -> Mapping[str, int]:
    """Return how many groups an environment has."""
    groups = zip(texts(assignments["environment"]), texts(assignments["group_id"]), strict=True)
    return Counter(environment for environment, _ in set(groups))


def _frozen(names: Sequence[str], config: View, teachers: TeacherService) -> dict[str, ServedModel]:
    """Return where those are served that sample environments in place of the policy, or play single seats there."""
    samplers = {
        name: teachers.serve(teacher)
        for name in names
        if (teacher := for_environment(config.teachers, name)) is not None
    }
    if config.external:  # in place of the policy, which keeps the name that has no environment's
        samplers[OF_POLICY] = ServedModel(config.external.url, "", config.external.model, chat=config.external)
    return samplers | frozen_seat_models([each for each in config.environments if each.name in names], teachers.serve)


def _missing(assignments: pa.Table, parts: Parts) -> pa.Table:
    return rows_without(assignments, "group_id", parts.finished_units())


STAGE = Stage(
    name="rollout",
    version=3,
    reads=("assignments", "examples"),
    writes=("traces", "messages", "images", "image_tensors", "engine_metrics", "routed_experts"),
    optional=("images", "image_tensors", "engine_metrics", "routed_experts"),
    sections=(
        "rollout",
        "environments",
        "engine",
        "model",
        "teachers",
        "external",
        "oversampling",
        "records_experts",
        "environment_judges",
    ),
    read_inputs=RolloutInputs.read,
    function=rollout,
    services=("engine", "teachers", "environments", "graders"),
    unit=GROUPS,
)
QUEUE_STAGE = replace(
    STAGE,
    writes=(*STAGE.writes, "intakes", "stale_groups", "intake_loads", "token_policies"),
    optional=(*STAGE.optional, "stale_groups", "token_policies"),
)
"""The same stage where its groups come from the queue."""
task, queue_task = as_task(STAGE), as_task(QUEUE_STAGE)

"""Intake: the rollouts of a step out of the stream of groups that is sampled ahead of the training.

Reads assignments and examples; writes traces, messages, intakes and intake_loads, stale_groups where some came to be
too old, token_policies where weights were exchanged under a rollout, images where there are any, and what the engines
counted where that is asked for. It stands in for the stage rollout where `rollout.max_off_policy_steps` is 2 or more,
and has its name.
"""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from storage.schemas.stage_tables import INTAKE_LOADS, INTAKES, STALE_GROUPS, TRACES
from tasks.arrays.columns import texts
from tasks.arrays.group_counts import num_wanted
from tasks.inference.sampling.rollouts import Renewal, SamplingPlan
from tasks.inference.trace_rows.failures import STALE, Failure
from tasks.inference.trace_rows.rows import RolloutOrigin, error_columns, row_of_failure, trace_tables
from tasks.rollout.stage import STAGE as ROLLOUT
from tasks.rollout.stage import Put, RolloutInputs, Runner
from tasks.rollout.stream import FinishedGroup, Group, SamplerSide, StaleGroup, Stream, step_of
from tasks.runtime.prefect_task import as_task
from tasks.runtime.services import EngineService, require
from tasks.runtime.stage import Attempt, Policy, Stage, Tables


@dataclass(frozen=True)
class IntakeInputs:
    """The inputs of the stage rollout, and the stream that its groups are taken from."""

    rollout: RolloutInputs
    stream: Stream
    recorded_inputs: dict[str, str]
    """Inputs of the work in the ledger; the assignments and policies of the groups are added."""

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        return cls(RolloutInputs.read(attempt), attempt.parameters, attempt.inputs)


def intake(inputs: IntakeInputs, config: View) -> Tables:
    """Take the groups of the stream that end first, as many as the step's own assignments name; each is safe at once.

    With oversampling they name more than the step takes. What no later step may take is recorded as stale, after the
    groups of the step. `policy` is the oldest one that may sample for the step. Which groups are taken depends on how
    long rollouts last: the rows that are recorded decide, and a step that is called again takes only what is missing.
    Added to `inputs` are the assignments of the groups and the policies that may have sampled them. Raises what
    sampling raises.
    """
    rollout, stream, recorded = inputs.rollout, inputs.stream, inputs.recorded_inputs
    step, parts, policy = rollout.step, rollout.parts, require(rollout.policy)
    runners: dict[int, Runner] = {}
    counted: list[Group] = []  # by the engines, after the last group of a sampler
    count = counted.append if config.engine.metrics else None
    update = config.rollout.weight_update

    def sample(sampler: Policy, assigned: pa.Table, put: Put, side: SamplerSide) -> None:
        # One a policy: what is known of crashes counts while it samples.
        services = rollout.engine, rollout.environments, rollout.teachers
        arguments = config, sampler.version, sampler, *services, count, rollout.turns
        runner = runners.setdefault(sampler.version, Runner(*arguments, counts_with_groups=True))
        plan = SamplingPlan(
            outdated=side.is_outdated,
            begin=side.begin,
            drops_begun=update == "abort",
            expired=stream.find_expired,
            streams=True,
            meter=stream.meter,
        )
        if update == "keep":
            plan = replace(plan, renew=lambda: _renew(side, rollout.engine, config))
        if update == "keep" or (update == "wait" and rollout.turns):
            plan = replace(plan, versions=stream.versions)
        runner.sample_some(assigned, rollout.examples, lambda rows: put(_with_counts(rows, counted)), plan)

    groups, stale = parts.finished_units(), {row["group_id"] for row in parts.earlier_rows("stale_groups")}
    done = groups - stale
    wanted = num_wanted(rollout.assignments, config.oversampling or 1.0)
    for place, group in enumerate(stream.take(step, wanted, done, sample, stale), len(done)):
        groups.add(group.group_id)
        recorded |= stream.origins(groups, oldest=policy.version)
        parts.put(_rows(group, step, place, config.rollout.max_in_flight))
    if given_up := stream.expire(step):
        groups.update(each.group_id for each in given_up)
        recorded |= stream.origins(groups, oldest=policy.version)
        # In one piece: they are the last rows of the step, and all of them or none are there after a crash.
        parts.put(_join(_stale_rows(each, step, policy, config) for each in given_up))
    return {}


def _with_counts(rows: Group, counted: list[Group]) -> Group:
    """Return the rows of a group with what the engines counted before it, which is in `counted` no more."""
    name = "engine_metrics"
    tables = [each[name] for each in (*counted, rows) if name in each]
    counted.clear()
    return {**rows, name: pa.concat_tables(tables)} if tables else rows


def _renew(side: SamplerSide, engine: EngineService, config: View) -> Renewal | None:
    """Bring the engine to the newest policy under what is being sampled."""
    renewed = side.renew(lambda policy: engine.exchange(policy, recompute=config.rollout.recompute_states))
    return Renewal(side.policy, *renewed) if renewed else None


def _rows(group: FinishedGroup, step: int, place: int, max_in_flight: int) -> Group:
    """Return the rows of a group as those of the step that takes it, with its row of intakes."""
    traces = group.rows["traces"]
    row = {
        "place": place,
        "group_id": group.group_id,
        "assigned_step": step_of(group.group_id),
        "policy_key": group.policy.key,
        "policy_version": group.policy.version,
        "age": step - group.policy.version,
        "assignment_ids": list(dict.fromkeys(texts(traces["assignment_id"]))),
    }
    made = {**group.rows, "traces": _of_step(traces, step), "intakes": pa.Table.from_pylist([row], INTAKES.arrow)}
    if group.load:
        load = {"group_id": group.group_id, "max_in_flight": max_in_flight, **asdict(group.load)}
        made["intake_loads"] = pa.Table.from_pylist([load], INTAKE_LOADS.arrow)
    return made


def _stale_rows(group: StaleGroup, step: int, oldest: Policy, config: View) -> Group:
    """Return the rows of a group that nobody may take any more: what it left, or for each member that it left nothing.

    Of one that was not begun the traces name the `oldest` policy that may sample for the step.
    """
    sampled_by = group.begun.policy if group.begun else group.finished.policy if group.finished else None
    members, now = group.assigned.to_pylist(), time.time()
    started = group.begun.started_at if group.begun else now
    how = "left over" if group.finished else f"stopped after {now - started:.1f} s" if sampled_by else "not begun"
    failure = Failure(STALE, "Stale", f"{how}: no step within rollout.max_off_policy_steps took its group")
    if group.finished:
        traces = _of_step(group.finished.rows["traces"], step)
        rows = [row | {"reward": None, **error_columns(failure)} for row in traces.to_pylist()]
        made = {**group.finished.rows, "traces": pa.Table.from_pylist(rows, TRACES.arrow)}
    else:
        own = {each.name: each.temperature for each in config.environments}
        policy = sampled_by or oldest
        temperatures = [own[row["environment"]] for row in members]
        origins = [
            RolloutOrigin(row, policy.key, policy.version, step, config.rollout.temperature if given is None else given)
            for row, given in zip(members, temperatures, strict=True)
        ]
        made = trace_tables([row_of_failure(failure, each, started, now - started) for each in origins], [])
    row: dict[str, Any] = {
        "group_id": group.group_id,
        "assigned_step": step_of(group.group_id),
        "environment": members[0]["environment"],
        "example_id": members[0]["example_id"],
        "policy_key": sampled_by.key if sampled_by else "",
        "policy_version": sampled_by.version if sampled_by else None,
        "has_ended": group.finished is not None,
        "assignment_ids": [member["assignment_id"] for member in members],
    }
    return {**made, "stale_groups": pa.Table.from_pylist([row], STALE_GROUPS.arrow)}


def _join(groups: Iterable[Group]) -> Group:
    """Return the rows of some groups as one."""
    every = list(groups)
    names = dict.fromkeys(name for each in every for name in each)  # not every group has images
    return {name: pa.concat_tables([each[name] for each in every if name in each]) for name in names}


def _of_step(traces: pa.Table, step: int) -> pa.Table:
    """Return traces with their staleness in a step; those of frozen models are of the step itself."""
    frozen = pc.equal(traces["policy_key"], pa.scalar(""))
    versions = pc.if_else(frozen, pa.scalar(step, pa.int64()), traces["policy_version"])
    for name, values in {"policy_version": versions, "staleness": pc.subtract(step, versions)}.items():
        index = traces.schema.get_field_index(name)
        traces = traces.set_column(index, traces.schema.field(index), values)
    return traces


STAGE = Stage(
    name=ROLLOUT.name,
    version=ROLLOUT.version,
    reads=ROLLOUT.reads,
    writes=(*ROLLOUT.writes, "intakes", "stale_groups", "intake_loads", "token_policies"),
    optional=(*ROLLOUT.optional, "stale_groups", "token_policies"),
    sections=ROLLOUT.sections,
    read_inputs=IntakeInputs.read,
    function=intake,
    services=ROLLOUT.services,
    unit=ROLLOUT.unit,
)
task = as_task(STAGE)

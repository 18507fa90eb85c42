"""Intake: the rollouts of a step out of the stream of groups that is sampled ahead of the training.

Reads assignments and examples; writes traces, messages and intakes, and images where there are any. It stands in for
the stage rollout where `rollout.max_off_policy_steps` is 2 or more, and has its name.
"""

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from storage.schemas.stage_tables import INTAKES
from tasks.arrays.columns import texts
from tasks.inference.sampling.rollouts import SamplingPlan
from tasks.rollout.stage import STAGE as ROLLOUT
from tasks.rollout.stage import Put, Runner
from tasks.rollout.stream import FinishedGroup, Group, Stream, step_of
from tasks.runtime.execute import Parts
from tasks.runtime.prefect_task import as_task
from tasks.runtime.services import EngineService, EnvironmentService, TeacherService
from tasks.runtime.stage import Policy, Stage, Tables


def intake(
    tables: Tables,
    config: View,
    *,
    step: int,
    policy: Policy,
    parts: Parts,
    inputs: dict[str, str],
    stream: Stream,
    engine: EngineService,
    environments: EnvironmentService,
    teachers: TeacherService,
) -> Tables:
    """Take the groups of the stream that end first, as many as the step's own assignments name; each is safe at once.

    `policy` is the oldest one that may sample for the step. Which groups are taken depends on how long rollouts last:
    the rows that are recorded decide, and a step that is called again takes only what is missing. Added to `inputs` are
    the assignments of the groups and the policies that may have sampled them. Raises what sampling raises.
    """
    runners: dict[int, Runner] = {}

    def sample(sampler: Policy, assigned: pa.Table, put: Put, outdated: Callable[[], bool]) -> None:
        # One a policy: what is known of crashes counts while it samples.
        arguments = config, sampler.version, sampler, engine, environments, teachers
        runner = runners.setdefault(sampler.version, Runner(*arguments))
        runner.sample_some(assigned, tables["examples"], put, SamplingPlan(outdated=outdated))

    done = parts.finished_units()
    wanted = len(set(texts(tables["assignments"]["group_id"])))
    groups = set(done)
    for place, group in enumerate(stream.take(wanted - len(done), done, sample), len(done)):
        groups.add(group.group_id)
        inputs |= stream.origins(groups, oldest=policy.version)
        parts.put(_rows(group, step, place))
    return {}


def _rows(group: FinishedGroup, step: int, place: int) -> Group:
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
    return {**group.rows, "traces": _of_step(traces, step), "intakes": pa.Table.from_pylist([row], INTAKES.arrow)}


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
    writes=(*ROLLOUT.writes, "intakes"),
    optional=ROLLOUT.optional,
    sections=ROLLOUT.sections,
    function=intake,
    unit=ROLLOUT.unit,
)
task = as_task(STAGE)

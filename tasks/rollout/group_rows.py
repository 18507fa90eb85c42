"""Rows of groups that a step takes out of the RolloutQueue, and of stale groups; for the stage rollout."""

import time
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from storage.schemas.stage_tables import INTAKE_LOADS, INTAKES, STALE_GROUPS, TRACES
from tasks.arrays.columns import texts, with_column
from tasks.inference.sampling.model_requests import sampling_of
from tasks.inference.trace_rows.failures import STALE, Failure
from tasks.inference.trace_rows.rows import RolloutOrigin, by_policy, error_columns, row_without_trace, trace_tables
from tasks.rollout.queue import FinishedGroup, GroupTables, StaleGroup, step_of
from tasks.runtime.stage import Policy


def taken_rows(group: FinishedGroup, step: int, place: int, max_in_flight: int) -> GroupTables:
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
        load = {"group_id": group.group_id, "max_in_flight": max_in_flight, **group.load}
        made["intake_loads"] = pa.Table.from_pylist([load], INTAKE_LOADS.arrow)
    return made


def stale_rows(group: StaleGroup, step: int, oldest: Policy, config: View) -> GroupTables:
    """Return the rows of a stale group: its finished rollouts, or for each member a row that it has none.

    Where it was not begun the traces name the `oldest` policy that may sample for the step.
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
        policy = sampled_by or oldest
        origins = [
            RolloutOrigin(row, policy.key, policy.version, step, sampling_of(config, row["environment"])["temperature"])
            for row in members
        ]
        made = trace_tables([row_without_trace(failure, each, started, now - started) for each in origins], [])
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


def concat_groups(groups: Iterable[GroupTables]) -> GroupTables:
    """Return the rows of some groups by table."""
    groups = list(groups)
    tables = dict.fromkeys(table for group in groups for table in group)  # not every group has images
    return {table: pa.concat_tables([group[table] for group in groups if table in group]) for table in tables}


def _of_step(traces: pa.Table, step: int) -> pa.Table:
    """Return traces with their staleness in a step; those of frozen models are of the step itself."""
    nobody = pc.equal(traces["policy_key"], pa.scalar(""))
    versions = pc.if_else(nobody, pa.scalar(step, pa.int64()), traces["policy_version"])
    staleness = pc.if_else(by_policy(traces), pc.subtract(step, versions), pa.scalar(0, pa.int64()))
    return with_column(with_column(traces, "policy_version", versions), "staleness", staleness)

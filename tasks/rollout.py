"""Rollout: try every assigned example with a policy and record what happened, group by group.

Reads assignments and examples; writes traces and messages, and images where there are any.
"""

from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View, of
from tasks.columns import texts
from tasks.inference.rollouts import ServiceLost, sample
from tasks.inference.scoring import Served
from tasks.inference.seats import frozen_players
from tasks.parts import Parts
from tasks.serving import MOST_LOSSES, EngineRoom, TeacherRoom
from tasks.stage import Policy, Stage, Tables, as_task


class EnvironmentRoom(Protocol):
    """What the stage asks of whoever keeps the environment servers alive."""

    def addresses(self) -> dict[str, str]:
        """Return the address of every environment's server, all of them answering."""
        ...


def rollout(
    tables: Tables,
    config: View,
    *,
    step: int,
    policy: Policy | None,
    parts: Parts,
    engine: EngineRoom,
    environments: EnvironmentRoom,
    teachers: TeacherRoom,
) -> Tables:
    """Sample what earlier attempts have not committed; a group is safe as soon as it is finished.

    Environments that a teacher samples are sampled by that and not by the policy, which may be None if all are.
    A rollout that fails is a row with its error. Only the loss of the engine or of an environment server interrupts
    the stage: it waits until the service is back and samples the groups that are still missing. Raises what the
    rooms raise when a service does not come back.
    """
    losses = 0
    while (missing := _missing(tables["assignments"], parts)).num_rows:
        addresses = environments.addresses()  # first: it imports for seconds, while an engine may still be starting
        frozen = _frozen(missing, config, teachers)
        served = engine.at(policy) if policy else Served("", "")
        try:
            sample(
                missing,
                tables["examples"],
                engine_url=served.url,
                api_key=served.api_key,
                addresses=addresses,
                policy={"key": policy.key if policy else "", "version": policy.version if policy else step},
                step=step,
                config=config,
                on_group=lambda _group_id, rows: parts.put(rows),
                teachers=frozen,
                model=served.model,
            )
            break
        except ServiceLost:
            losses += 1  # at() and addresses() wait for a restart, but what never dies is not restarted
            if losses > MOST_LOSSES:
                raise
    return {}


def _frozen(missing: pa.Table, config: View, teachers: TeacherRoom) -> dict[str, Served]:
    """Return where those are served that sample environments in place of the policy, or play single seats there."""
    names = dict.fromkeys(texts(missing["environment"]))
    samplers = {name: teachers.at(teacher) for name in names if (teacher := of(config.teachers, name)) is not None}
    return samplers | frozen_players([each for each in config.environments if each.name in names], teachers.at)


def _missing(assignments: pa.Table, parts: Parts) -> pa.Table:
    done = parts.done()
    return assignments.filter(
        pc.invert(pc.is_in(assignments["group_id"], value_set=pa.array(sorted(done), pa.string())))
    )


STAGE = Stage(
    name="rollout",
    version=1,
    reads=("assignments", "examples"),
    writes=("traces", "messages", "images"),
    optional=("images",),
    sections=("rollout", "environments", "engine", "model", "teachers"),
    function=rollout,
    unit=("traces", "group_id"),
    needs=("step", "policy", "parts", "engine", "environments", "teachers"),
)
task = as_task(STAGE)

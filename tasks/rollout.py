"""Rollout: try every assigned example with a policy and record what happened, group by group.

Reads assignments and examples; writes traces and messages.
"""

from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from tasks.inference.rollouts import ServiceLost, sample
from tasks.parts import Parts
from tasks.stage import Policy, Stage, Tables, as_task

MOST_LOSSES = 10
"""Times that a service may be lost in one stage; restarts of dead ones are bounded by their own sections."""


class EngineRoom(Protocol):
    """What the stage asks of whoever keeps the inference engine alive."""

    def at(self, policy: Policy) -> tuple[str, str]:
        """Return URL and API key of an engine that serves `policy`, checked against the learner's probe."""
        ...


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
    policy: Policy,
    parts: Parts,
    engine: EngineRoom,
    environments: EnvironmentRoom,
) -> Tables:
    """Sample what earlier attempts have not committed; a group is safe as soon as it is finished.

    A rollout that fails is a row with its error. Only the loss of the engine or of an environment server interrupts
    the stage: it waits until the service is back and samples the groups that are still missing. Raises what the
    rooms raise when a service does not come back.
    """
    losses = 0
    while (missing := _missing(tables["assignments"], parts)).num_rows:
        addresses = environments.addresses()  # first: it imports for seconds, while an engine may still be starting
        url, api_key = engine.at(policy)
        try:
            sample(
                missing,
                tables["examples"],
                engine_url=url,
                api_key=api_key,
                addresses=addresses,
                policy={"key": policy.key, "version": policy.version},
                step=step,
                config=config,
                on_group=lambda _group_id, rows: parts.put(rows),
            )
            break
        except ServiceLost:
            losses += 1  # at() and addresses() wait for a restart, but what never dies is not restarted
            if losses > MOST_LOSSES:
                raise
    return {}


def _missing(assignments: pa.Table, parts: Parts) -> pa.Table:
    done = parts.done()
    return assignments.filter(
        pc.invert(pc.is_in(assignments["group_id"], value_set=pa.array(sorted(done), pa.string())))
    )


STAGE = Stage(
    name="rollout",
    version=1,
    reads=("assignments", "examples"),
    writes=("traces", "messages"),
    sections=("rollout", "environments", "engine", "model"),
    function=rollout,
    unit=("traces", "group_id"),
    needs=("step", "policy", "parts", "engine", "environments"),
)
task = as_task(STAGE)

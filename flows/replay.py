"""Replay: recorded steps again from a stage on, with other settings, or with none to see the same come out."""

from typing import Any, Literal

from pydantic import Field

from configs.replay import StageName
from flows.orchestration.run_flow import run_flow
from flows.replays.config import prepare_replay
from flows.replays.loop import loop_replay, plan_run
from flows.replays.request import ReplayRequest
from flows.runtime.entry import StoreParameters, session_of


class ReplayParameters(StoreParameters):
    """Rare parameters of a replay."""

    policies: Literal["", "own", "recorded"] = Field(
        "", description="own (the default) trains along; recorded starts every step from the recorded policy"
    )
    regrade: bool = Field(False, description="score the recorded traces again with the reward functions of today")
    quarantine: bool = Field(True, description="leave out rollouts that were marked as unfit")


@run_flow("replay")
def replay(
    run: str,
    from_stage: Literal["", StageName] = "",
    until: Literal["", StageName] = "",
    steps: str = "",
    overrides: list[str] | None = None,
    name: str = "",
    advanced: ReplayParameters | None = None,
) -> dict[str, Any]:
    """Go through a run's recorded steps again in a new run; what lies before the first stage done again is shared.

    Args:
        run: name of the recorded run; it is not changed.
        from_stage: first stage to do again; empty takes the first that the overrides reach.
        until: last stage to do again; empty is training.
        steps: which steps, as 3:10 (3 to 9); empty takes all.
        overrides: dotted settings such as algorithm.normalise_std=true, one on each line.
        name: name of the new run; empty makes one that the same replay has again.
        advanced: what is rarely set: policies, scoring again, rollouts that are marked as unfit, another store.
    """
    rare = ReplayParameters.of(advanced)
    others = rare.store, rare.policies, rare.regrade, rare.quarantine
    asked = ReplayRequest(run, from_stage, until, steps, overrides or (), name, *others)
    with session_of(prepare_replay(asked), plan_run) as session:
        return loop_replay(session)

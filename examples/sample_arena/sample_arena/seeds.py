"""Seeds: runs of one episode that are to be independent draws must not sample with the same seed.

An episode is asked for with one seed, which every model call in it is sent. Two runs on the same prompt would then be
the same run, and two seats that choose between the same words would choose alike.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifiers.v1.agent import Agent

NUM_SEEDS = 2**63


def shift_seed(agent: "Agent", by: int = 1) -> None:
    """Let runs that `agent` begins from now on sample with its seed plus `by`; one without a seed stays without.

    Shift each seat of an episode by its own number, and one that plays several times before each further run.
    """
    sampling = agent.ctx.sampling
    seed = getattr(sampling, "seed", None)
    if seed is not None:
        agent.ctx = replace(agent.ctx, sampling=sampling.model_copy(update={"seed": (seed + by) % NUM_SEEDS}))

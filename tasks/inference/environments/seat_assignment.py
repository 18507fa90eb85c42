"""Assigns models and seeds to the seats of an episode, in the environment's own process.

verifiers binds models to seats once, when a server starts. Here they are bound with every request, because an engine
that is restarted has another address. And verifiers gives every agent run of an episode the request's sampling
parameters, seed included: two runs on one prompt would give the same text. Here each run gets its own seed.
"""

import copy
import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tasks.inference.sampling.seats import SEATS_HEADER

if TYPE_CHECKING:
    from verifiers.v1.agent import Agents
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.env import Env

SEED_STRIDE = 7_919
"""Between the seeds of the runs of one episode; the first run has the request's own."""
NUM_SEEDS = 2**63
"""Engines take seeds of 63 bits."""


def install_seat_assignment() -> None:
    """Patch verifiers so that environments of this process seat the players of each request. Idempotent."""
    from verifiers.v1.env import Env

    original = Env._episode_agents
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def episode_agents(self: "Env[Any]", ctx: "ModelContext", *rest: Any, **others: Any) -> "Agents":
        players, ctx = split_players(ctx)
        agents = original(_env_with_players(self, players), ctx, *rest, **others)
        for name in players:
            getattr(agents, name).trainable = False
        vary_seeds(agents)
        return agents

    Env._episode_agents = episode_agents


def split_players(ctx: "ModelContext") -> "tuple[Mapping[str, Any], ModelContext]":
    """Return the players that a request names by seat, and its context without their header."""
    if SEATS_HEADER not in ctx.client.headers:
        return {}, ctx
    headers = dict(ctx.client.headers)
    players = json.loads(headers.pop(SEATS_HEADER))
    return players, replace(ctx, client=ctx.client.model_copy(update={"headers": headers}))


def _env_with_players(env: "Env[Any]", players: Mapping[str, Any]) -> "Env[Any]":
    """Return the environment with players bound to its seats; the copy shares everything else with `env`."""
    if not players:
        return env
    from verifiers.v1.configs.agent import AgentConfig, agent_config_fields

    seats = agent_config_fields(env.config)
    if unknown := sorted(players.keys() - seats.keys()):
        raise ValueError(f"models are to play the seats {unknown}; this environment has the seats {sorted(seats)}")
    bound = {}
    for name, player in players.items():
        requested = AgentConfig.model_validate(player)
        # The seat's own settings override the request's.
        own = {} if (sampling := seats[name].sampling) is None else sampling.model_dump(exclude_unset=True)
        assert requested.sampling is not None, "a player has sampling parameters"
        sampling = requested.sampling.model_copy(update=own)
        bound[name] = seats[name].model_copy(
            update={"client": requested.client, "model": requested.model, "sampling": sampling}
        )
    copied = copy.copy(env)
    copied.config = env.config.model_copy(update=bound)
    return copied


def vary_seeds(agents: "Agents") -> None:
    """Give each run of these agents a seed of its own, by the order in which they start."""
    runs = itertools.count()
    for agent in agents._agents.values():
        agent._rollout_params = functools.partial(_params_with_seed, agent._rollout_params, runs)


def _params_with_seed(params_of: Any, runs: Iterator[int], *arguments: Any, **others: Any) -> dict[str, Any]:
    params: dict[str, Any] = params_of(*arguments, **others)
    sampling, number = params["ctx"].sampling, next(runs)
    seed = getattr(sampling, "seed", None)
    if number == 0 or seed is None:
        return params
    sampling = sampling.model_copy(update={"seed": (seed + number * SEED_STRIDE) % NUM_SEEDS})
    config = params["agent_config"].model_copy(update={"sampling": sampling})
    return params | {"ctx": replace(params["ctx"], sampling=sampling), "agent_config": config}

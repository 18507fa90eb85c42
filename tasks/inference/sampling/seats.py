"""Which model plays which seat of an environment: named by the pipeline, bound in the environment's own process.

The address of a served model changes with every restart of its engine, and verifiers binds models to seats once, when a
server starts. So each request names the models of its seats, in a header of its client that the environment's process
removes again: no engine ever sees it. And verifiers gives every agent run of an episode the request's sampling
parameters, seed included: two runs on one prompt would give the same text. Here each run gets its own seed, and of it
each of its calls (`call_seeds`).
"""

import copy
import functools
import itertools
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tasks.inference.engine.client import ServedModel
from tasks.inference.trace_rows.rows import RolloutOrigin, Row

if TYPE_CHECKING:
    from verifiers.v1.agent import Agents
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import ClientConfig, TrainClientConfig
    from verifiers.v1.env import Env

    from configs.algorithms import TeacherConfig
    from configs.environments import EnvironmentConfig

SEATS_HEADER = "X-Stagecoach-Seats"
SEED_STRIDE = 7_919
"""Between the seeds of the runs of one episode; the first run has the request's own."""
NUM_SEEDS = 2**63
"""Engines take seeds of 63 bits."""


class SeatMismatch(ValueError):
    """A seat was played by another model than the one that the config names."""


def seat_model_name(environment: str, seat: str) -> str:
    """Return the name of a frozen seat's model among the served models, beside those that sample whole environments."""
    return f"{environment}\x1f{seat}"


def frozen_seat_models(
    environments: "Iterable[EnvironmentConfig]", serve: "Callable[[TeacherConfig], ServedModel]"
) -> dict[str, ServedModel]:
    """Return the frozen models of all seats by `seat_model_name`; `serve` returns where one is served."""
    return {
        seat_model_name(environment.name, name): serve(seat.model)
        for environment in environments
        for name, seat in environment.seats.items()
        if seat.model is not None
    }


@dataclass(frozen=True)
class SeatClient:
    """What calls the model that plays a seat, and the model's name."""

    client: "ClientConfig"
    model: str
    salt: str = ""
    """Of a frozen model: identifies its weights to the prefix cache."""


@dataclass(frozen=True)
class Seats:
    """The seats of one environment that differ from those of the model that samples it."""

    environment: str
    players: Mapping[str, SeatClient]
    """The frozen models, by seat."""
    untrained: frozenset[str] = frozenset()
    """Seats that the policy plays and is not trained on."""
    unserved: frozenset[str] = frozenset()
    """Frozen seats whose model is not served: fine where the environment is not sampled."""

    @classmethod
    def of(
        cls,
        environment: "EnvironmentConfig",
        served: Mapping[str, ServedModel],
        clients: "Mapping[str, TrainClientConfig]",
    ) -> "Seats":
        """Return the seats of an environment; `served` models and their clients are by `seat_model_name`."""
        frozen = [name for name, seat in environment.seats.items() if seat.model is not None]
        names = {seat: seat_model_name(environment.name, seat) for seat in frozen}
        players = {
            seat: SeatClient(clients[name], served[name].model, served[name].salt)
            for seat, name in names.items()
            if name in served
        }
        untrained = frozenset(name for name, seat in environment.seats.items() if not seat.trainable)
        return cls(environment.name, players, untrained, frozenset(frozen) - players.keys())

    def add_players(self, client: "ClientConfig") -> "ClientConfig":
        """Return the client of a request with the frozen models of the seats in its header."""
        assert not self.unserved, f"seats {sorted(self.unserved)} of {self.environment!r} would fall to the policy"
        if not self.players:
            return client
        seats = {
            name: {
                "client": player.client.model_dump(mode="json"),
                "model": player.model,
                "sampling": {"cache_salt": player.salt},
            }
            for name, player in self.players.items()
        }
        return client.model_copy(update={"headers": {**client.headers, SEATS_HEADER: json.dumps(seats)}})

    def trace_columns(self, agent: Row, default: SeatClient, origin: RolloutOrigin) -> Row:
        """Return the columns of a trace's row that depend on the model that played it; `agent` is the trace's own.

        What another model sampled is not the policy's and is never trained on, also where the environment itself bound
        that model. Raises SeatMismatch where a frozen seat was not played by its model.
        """
        seat, config = agent["name"], agent["config"]
        # A trace does not always say what sampled it; then there is nothing to compare.
        client = config.get("client")
        recorded = None if client is None else (client["base_url"], config["model"])
        player = self.players.get(seat)
        expected = player or default
        matches = recorded in (None, (expected.client.base_url, expected.model))
        if player is not None and not matches:
            raise SeatMismatch(
                f"environment {self.environment!r}, seat {seat!r}: it was to be played by {expected.model!r} at "
                f"{expected.client.base_url}, and {recorded} played it. This rollout was not recorded; all groups "
                "before it are safe. Let the run serve the environment itself (no address), with the recorded version "
                "of verifiers"
            )
        if player is not None or not matches:
            return {"trainable": False, "policy_key": "", "policy_version": origin.step, "staleness": 0}
        return {"trainable": False} if seat in self.untrained else {}


def install_seat_assignment() -> None:
    """Patch verifiers so that environments of this process seat the players of each request. Idempotent."""
    from verifiers.v1.env import Env

    # The one function of verifiers that binds models to the agents of an episode; `__wrapped__` marks ours.
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
    # A shallow copy: tool servers and interception, which the episodes of a server share, stay the same objects.
    copied = copy.copy(env)
    copied.config = env.config.model_copy(update=bound)
    return copied


def vary_seeds(agents: "Agents") -> None:
    """Give each run of these agents a seed of its own, by the order in which they start, and each call of a run too."""
    runs = itertools.count()
    for agent in agents._agents.values():
        # Weakly: an agent that held itself would keep its trace, and all that an episode makes, until a collection.
        method = weakref.WeakMethod(agent._rollout_params)
        agent._rollout_params = functools.partial(_params_with_seed, method, runs)


def _params_with_seed(method: Any, runs: Iterator[int], *arguments: Any, **others: Any) -> dict[str, Any]:
    from tasks.inference.sampling.call_seeds import seed_calls  # it imports verifiers

    params: dict[str, Any] = method()(*arguments, **others)
    sampling, number = params["ctx"].sampling, next(runs)
    seed = getattr(sampling, "seed", None)
    # The first run keeps the seed of the assignment, so that one agent alone is sampled as without us.
    if number and seed is not None:
        sampling = sampling.model_copy(update={"seed": (seed + number * SEED_STRIDE) % NUM_SEEDS})
        config = params["agent_config"].model_copy(update={"sampling": sampling})
        params |= {"ctx": replace(params["ctx"], sampling=sampling), "agent_config": config}
    return seed_calls(params)

"""Seats: which model plays which seat of an environment, and which columns of a trace's row follow from that.

The address of a served model changes with every restart of its engine, and verifiers binds models to seats when a
server starts. So each request for a rollout names the models of its seats (`environments/agent_runs.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from configs.environments import POLICY
from tasks.inference.engine.client import OF_POLICY, ServedModel
from tasks.inference.sampling.bindings import UnknownPlayer
from tasks.inference.trace_rows.rows import RolloutOrigin, Row
from tasks.runtime.refs import Policy

if TYPE_CHECKING:
    from verifiers.v1.configs.client import ClientConfig, TrainClientConfig

    from configs.algorithms import TeacherConfig
    from configs.environments import EnvironmentConfig


class SeatMismatch(ValueError):
    """A seat was played by another model than the one that the config names."""


def seat_model_name(environment: str, key: str) -> str:
    """Return the name of a frozen seat's model among the served models, beside those that sample whole environments.

    `key` is the model's in the environment's section, such as seats.NAME.model.
    """
    return f"{environment}\x1f{key}"


def frozen_seat_models(
    environments: "Iterable[EnvironmentConfig]", serve: "Callable[[TeacherConfig], ServedModel]"
) -> dict[str, ServedModel]:
    """Return the frozen models of all seats by `seat_model_name`; `serve` returns where one is served."""
    return {
        seat_model_name(environment.name, key): serve(player)
        for environment in environments
        for key, player in environment.players.items()
        if not player.beside
    }


@dataclass(frozen=True)
class SeatClient:
    """What calls the model that plays a seat, and the model's name."""

    client: "ClientConfig"
    model: str
    salt: str = ""
    """Of a frozen model: identifies its weights to the prefix cache."""
    policy: Policy | None = None
    """The policy of the store that a frozen model is; None for models that are none."""


@dataclass(frozen=True)
class Seats:
    """The seats of one episode that differ from those of the model that samples its environment."""

    environment: str
    players: Mapping[str, SeatClient]
    """The frozen models, by seat."""
    untrained: frozenset[str] = frozenset()
    """Seats that the policy plays and is not trained on."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of the players that a binding names or the policy's engine serves, by seat; rows record them."""

    @classmethod
    def of(
        cls,
        environment: "EnvironmentConfig",
        served: Mapping[str, ServedModel],
        clients: "Mapping[str, TrainClientConfig]",
        binding: Mapping[str, str] | None = None,
    ) -> "Seats":
        """Return the seats of an episode.

        `served` models and their clients are by `seat_model_name`, the policy's under OF_POLICY; `binding` has names of
        models by seat. Raises UnknownPlayer for a model that is not served.
        """
        binding, seats, policy = dict(binding or {}), environment.seats.items(), served.get(OF_POLICY)
        keys = {name: f"seats.{name}.model" for name, seat in seats if seat.model}
        keys |= {seat: f"bindings.models.{name}" for seat, name in binding.items()}
        players, names = dict[str, SeatClient](), dict[str, str]()
        for seat, key in keys.items():
            if binding.get(seat) == POLICY:
                continue
            beside = environment.players[key].beside
            place = OF_POLICY if beside else seat_model_name(environment.name, key)
            model = policy.beside.get(beside) if beside and policy else served.get(place)
            if model is None:
                raise UnknownPlayer(
                    f"seat {seat!r} of {environment.name!r} would fall to the policy: no {key} is served"
                )
            players[seat] = SeatClient(clients[place], model.model, model.salt, model.policy)
            if name := binding.get(seat, beside):
                names[seat] = name
        return cls(environment.name, players, frozenset(name for name, seat in seats if not seat.trainable), names)

    @property
    def requested_players(self) -> dict[str, Any]:
        """The frozen models by seat, as a request for a rollout names them."""
        return {
            name: {
                "client": player.client.model_dump(mode="json"),
                "model": player.model,
                "sampling": {"cache_salt": player.salt},
            }
            for name, player in self.players.items()
        }

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
            # A frozen model is never stale: its version is that of the policy that it is, or else the step.
            of_store = (player and player.policy) or Policy("", origin.step)
            key = {"policy_key": of_store.key, "policy_version": of_store.version}
            return {"trainable": False, **key, "staleness": 0}
        return {"trainable": False} if seat in self.untrained else {}

"""Seats: which model plays which seat of an environment, and which columns of a trace's row follow from that.

The address of a served model changes with every restart of its engine, and verifiers binds models to seats when a
server starts. So each request for a rollout names the models of its seats (`environments/agent_runs.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.inference.engine.client import ServedModel
from tasks.inference.trace_rows.rows import RolloutOrigin, Row

if TYPE_CHECKING:
    from verifiers.v1.configs.client import ClientConfig, TrainClientConfig

    from configs.algorithms import TeacherConfig
    from configs.environments import EnvironmentConfig


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
        seats = environment.seats.items()
        names = {name: seat_model_name(environment.name, name) for name, seat in seats if seat.model is not None}
        players = {
            seat: SeatClient(clients[name], served[name].model, served[name].salt)
            for seat, name in names.items()
            if name in served
        }
        untrained = frozenset(name for name, seat in seats if not seat.trainable)
        return cls(environment.name, players, untrained, frozenset(names.keys() - players.keys()))

    @property
    def requested_players(self) -> dict[str, Any]:
        """The frozen models by seat, as a request for a rollout names them."""
        assert not self.unserved, f"seats {sorted(self.unserved)} of {self.environment!r} would fall to the policy"
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
            return {"trainable": False, "policy_key": "", "policy_version": origin.step, "staleness": 0}
        return {"trainable": False} if seat in self.untrained else {}

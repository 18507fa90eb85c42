"""Seats on the pipeline's side: which model plays which seat of an environment, and what that means for its rows.

The address of a served model changes with every restart of its engine, so each request names the models of its seats.
They travel in a header of the request's client, which the environment's process removes again
(`tasks.inference.environments.seat_assignment`): no engine ever sees it.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.inference.engine.scoring import ServedModel
from tasks.inference.trace_rows.rows import RolloutOrigin, Row

if TYPE_CHECKING:
    from verifiers.v1.configs.client import ClientConfig, TrainClientConfig
    from verifiers.v1.trace import WireTrace

    from configs.algorithms import TeacherConfig
    from configs.environments import EnvironmentConfig

SEATS_HEADER = "X-Stagecoach-Seats"


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
    """The client and model of the seats that have no model of their own."""

    client: "ClientConfig"
    model: str


@dataclass(frozen=True)
class SeatPlayer:
    """A frozen model that plays a seat."""

    client: "TrainClientConfig"
    served: ServedModel


@dataclass(frozen=True)
class Seats:
    """The seats of one environment that differ from those of the model that samples it."""

    environment: str
    players: Mapping[str, SeatPlayer]
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
        players = {seat: SeatPlayer(clients[name], served[name]) for seat, name in names.items() if name in served}
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
                "model": player.served.model,
                "sampling": {"cache_salt": player.served.salt},
            }
            for name, player in self.players.items()
        }
        return client.model_copy(update={"headers": {**client.headers, SEATS_HEADER: json.dumps(seats)}})

    def trace_columns(self, trace: "WireTrace", default: SeatClient, origin: RolloutOrigin) -> Row:
        """Return the columns of a trace's row that depend on the model that played it.

        What another model sampled is not the policy's and is never trained on, also where the environment itself bound
        that model. Raises SeatMismatch where a frozen seat was not played by its model.
        """
        seat, recorded = trace.agent.name, _recorded_player(trace)
        player = self.players.get(seat)
        expected = SeatClient(player.client, player.served.model) if player else default
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


def _recorded_player(trace: "WireTrace") -> tuple[str, str | None] | None:
    """Return base URL and name of the model that a trace says it was sampled by; None where it does not say."""
    config = trace.agent.config
    return None if config.client is None else (config.client.base_url, config.model)

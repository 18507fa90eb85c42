"""Seats from the pipeline's side: which model is asked to play which, and what that makes of their rows.

Where a model is served changes with every restart of its engine, so each request says it. It travels in a header of the
request's client that the environment's process takes out again (`tasks.inference.environments.seat_assignment`); no engine ever sees it.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.inference.engine.scoring import Served
from tasks.inference.trace_rows.rows import Attempted, Row

if TYPE_CHECKING:
    from verifiers.v1.configs.client import ClientConfig, TrainClientConfig
    from verifiers.v1.trace import WireTrace

    from configs.algorithms import TeacherConfig
    from configs.environments import EnvironmentConfig

HEADER = "X-Stagecoach-Seats"


class SeatMismatch(ValueError):
    """A seat was played by another model than the one that the config names."""


def served_as(environment: str, seat: str) -> str:
    """Return under what name the model of a frozen seat is kept beside those that sample whole environments."""
    return f"{environment}\x1f{seat}"


def frozen_players(
    environments: "Iterable[EnvironmentConfig]", at: "Callable[[TeacherConfig], Served]"
) -> dict[str, Served]:
    """Return where the frozen models of all seats are served, by `served_as`; `at` finds one."""
    return {
        served_as(environment.name, name): at(seat.model)
        for environment in environments
        for name, seat in environment.seats.items()
        if seat.model is not None
    }


@dataclass(frozen=True)
class SeatClient:
    """Who is asked to play the seats that have no model of their own."""

    client: "ClientConfig"
    model: str


@dataclass(frozen=True)
class Player:
    """A frozen model that plays a seat."""

    client: "TrainClientConfig"
    served: Served


@dataclass(frozen=True)
class Seats:
    """Who plays the seats of one environment, where that is not the model that samples it."""

    environment: str
    players: Mapping[str, Player]
    untrained: frozenset[str] = frozenset()
    """Seats that the policy plays and is not trained on."""
    unserved: frozenset[str] = frozenset()
    """Frozen seats whose model nobody served: fine where the environment is not sampled."""

    @classmethod
    def of(
        cls, environment: "EnvironmentConfig", served: Mapping[str, Served], clients: "Mapping[str, TrainClientConfig]"
    ) -> "Seats":
        """Return the seats of an environment, with the models of `served` and their clients by `served_as`."""
        names = [name for name, seat in environment.seats.items() if seat.model is not None]
        places = {name: served_as(environment.name, name) for name in names}
        players = {name: Player(clients[place], served[place]) for name, place in places.items() if place in served}
        untrained = frozenset(name for name, seat in environment.seats.items() if not seat.trainable)
        return cls(environment.name, players, untrained, frozenset(names) - players.keys())

    def told(self, client: "ClientConfig") -> "ClientConfig":
        """Return the client of a request with word of who plays which seat."""
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
        return client.model_copy(update={"headers": {**client.headers, HEADER: json.dumps(seats)}})

    def columns(self, trace: "WireTrace", asked: SeatClient, attempted: Attempted) -> Row:
        """Return what of a trace's row follows from who played it.

        Whatever another model sampled is not the policy's and is never trained on, whoever bound it. Raises
        SeatMismatch where a frozen seat was not played by its model.
        """
        seat, played = trace.agent.name, _played_by(trace)
        player = self.players.get(seat)
        wanted = SeatClient(player.client, player.served.model) if player else asked
        as_asked = played in (None, (wanted.client.base_url, wanted.model))
        if player is not None and not as_asked:
            raise SeatMismatch(
                f"environment {self.environment!r}, seat {seat!r}: it was to be played by {wanted.model!r} at "
                f"{wanted.client.base_url}, and {played} played it. This rollout was not recorded; all groups before "
                "it are safe. Let the run serve the environment itself (no address), with the recorded version of "
                "verifiers"
            )
        if player is not None or not as_asked:
            return {"trainable": False, "policy_key": "", "policy_version": attempted.step, "staleness": 0}
        return {"trainable": False} if seat in self.untrained else {}


def _played_by(trace: "WireTrace") -> tuple[str, str | None] | None:
    """Return base URL and name of the model that a trace says it was sampled by; None where it does not say."""
    config = trace.agent.config
    return None if config.client is None else (config.client.base_url, config.model)

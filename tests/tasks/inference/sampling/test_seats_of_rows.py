"""Who a row belongs to: what another model sampled is never the policy's, whoever put it there."""

import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from configs.environments import EnvironmentConfig
from tasks.inference.engine.client import ServedModel
from tasks.inference.sampling.seats import (
    SEED_STRIDE,
    SeatClient,
    SeatMismatch,
    Seats,
    frozen_seat_models,
    seat_model_name,
    vary_seeds,
)
from tasks.inference.trace_rows.rows import RolloutOrigin

ORIGIN = RolloutOrigin({}, "the-policy", 3, 4, 1.0)
POLICY = SeatClient(SimpleNamespace(base_url="http://policy/v1"), "m")  # type: ignore[arg-type]
RIVAL = SeatClient(SimpleNamespace(base_url="http://rival/v1"), "r")  # type: ignore[arg-type]
SEATS = Seats("e", {"rival": RIVAL}, frozenset({"helper"}))
FOREIGN = {"trainable": False, "policy_key": "", "policy_version": 4, "staleness": 0}


def played(seat: str, url: str | None, model: str | None) -> Any:
    client = None if url is None else {"base_url": url}
    return {"name": seat, "config": {"client": client, "model": model}}


@pytest.mark.parametrize(
    ("seat", "url", "model", "expected"),
    [
        ("agent", "http://policy/v1", "m", {}),
        ("helper", "http://policy/v1", "m", {"trainable": False}),
        ("rival", "http://rival/v1", "r", FOREIGN),
        ("agent", "http://elsewhere/v1", "m", FOREIGN),
        ("agent", "http://policy/v1", "another", FOREIGN),
        ("helper", "http://elsewhere/v1", "m", FOREIGN),
        ("agent", None, None, {}),
        ("rival", None, None, FOREIGN),
    ],
)
def test_a_row_is_the_policy_s_only_where_the_policy_played(
    seat: str, url: str | None, model: str | None, expected: dict[str, Any]
) -> None:
    assert SEATS.trace_columns(played(seat, url, model), POLICY, ORIGIN) == expected


@pytest.mark.parametrize(("url", "model"), [("http://policy/v1", "m"), ("http://rival/v1", "m"), ("http://x/v1", "r")])
def test_a_frozen_seat_that_another_model_played_stops_everything(url: str, model: str) -> None:
    with pytest.raises(SeatMismatch, match="seat 'rival': it was to be played by 'r' at http://rival/v1"):
        SEATS.trace_columns(played("rival", url, model), POLICY, ORIGIN)


def test_frozen_players_are_found_by_environment_and_seat() -> None:
    seats = {"a": {"model": {"url": "http://one"}}, "b": {"max_turns": 1}}
    environments = [
        EnvironmentConfig.model_validate({"name": name, "taskset": {"id": "t"}, "seats": own})
        for name, own in (("x", seats), ("y", {}), ("z", {"a": {"model": {"url": "http://two"}}}))
    ]
    found = frozen_seat_models(environments, lambda teacher: ServedModel(teacher.url, ""))
    assert {name: each.url for name, each in found.items()} == {
        seat_model_name("x", "a"): "http://one",
        seat_model_name("z", "a"): "http://two",
    }
    assert seat_model_name("x", "y/a") != seat_model_name("x/y", "a")


def test_a_frozen_seat_without_its_model_never_falls_to_the_policy() -> None:
    seats = {"a": {"model": {"url": "http://one"}}}
    environment = EnvironmentConfig.model_validate({"name": "x", "taskset": {"id": "t"}, "seats": seats})
    client: Any = SimpleNamespace(headers={}, base_url="http://policy/v1")
    with pytest.raises(AssertionError, match=r"seats \['a'\] of 'x' would fall to the policy"):
        Seats.of(environment, {}, {}).add_players(client)
    own = {"a": {"trainable": False}, "b": {"max_turns": 1}}
    own_section = EnvironmentConfig.model_validate({"name": "x", "taskset": {"id": "t"}, "seats": own})
    assert Seats.of(own_section, {}, {}).untrained == {"a"}
    plain = Seats.of(EnvironmentConfig(name="y", taskset={"id": "t"}), {}, {})
    assert plain.add_players(client) is client, "a request without frozen seats is as it was"


class Sampling(SimpleNamespace):
    """Sampling parameters as verifiers has them."""

    def model_copy(self, update: dict[str, Any]) -> "Sampling":
        return Sampling(**{**vars(self), **update})


@dataclass
class Context:
    """The context of an agent run."""

    sampling: Sampling


class Agent:
    """An agent that makes the parameters of its runs, as verifiers' own does."""

    def _rollout_params(self) -> dict[str, Any]:
        return {"ctx": Context(Sampling(seed=7)), "agent_config": Sampling(), "interception": None}


def test_agents_with_seeds_of_their_own_are_gone_with_their_episode() -> None:
    """Their traces are, too: a process that leaves them to the garbage collector holds those of many episodes."""
    agent = Agent()
    vary_seeds(SimpleNamespace(_agents={"agent": agent}))  # type: ignore[arg-type]
    seeds = [agent._rollout_params()["ctx"].sampling.seed for _ in range(3)]
    assert seeds == [7 + number * SEED_STRIDE for number in range(3)]
    left = weakref.ref(agent)
    gc.disable()
    try:
        del agent
        assert left() is None
    finally:
        gc.enable()

"""Who a row belongs to: what another model sampled is never the policy's, whoever put it there."""

from types import SimpleNamespace

import pytest

from configs.environments import EnvironmentConfig
from tasks.inference.engine.client import ServedModel
from tasks.inference.environments.agent_runs import add_header
from tasks.inference.sampling.seats import SeatClient, SeatMismatch, Seats, frozen_seat_models, seat_model_name
from tasks.inference.trace_rows.rows import RolloutOrigin
from tasks.runtime.stage import Policy

ORIGIN = RolloutOrigin({}, "the-policy", 3, 4, 1.0)
POLICY = SeatClient(SimpleNamespace(base_url="http://policy/v1"), "m")
RIVAL = SeatClient(SimpleNamespace(base_url="http://rival/v1"), "r")
BASE = SeatClient(POLICY.client, "below", policy=Policy("first", 0))
SEATS = Seats("e", {"rival": RIVAL, "base": BASE}, frozenset({"helper"}))
FOREIGN = {"trainable": False, "policy_key": "", "policy_version": 4, "staleness": 0}


def played(seat, url, model):
    client = None if url is None else {"base_url": url}
    return {"name": seat, "config": {"client": client, "model": model}}


@pytest.mark.parametrize(
    ("seat", "url", "model", "expected"),
    [
        ("agent", "http://policy/v1", "m", {}),
        ("helper", "http://policy/v1", "m", {"trainable": False}),
        ("rival", "http://rival/v1", "r", FOREIGN),
        ("base", "http://policy/v1", "below", FOREIGN | {"policy_key": "first", "policy_version": 0}),
        ("agent", "http://elsewhere/v1", "m", FOREIGN),
        ("agent", "http://policy/v1", "another", FOREIGN),
        ("helper", "http://elsewhere/v1", "m", FOREIGN),
        ("agent", None, None, {}),
        ("rival", None, None, FOREIGN),
    ],
)
def test_a_row_is_the_policy_s_only_where_the_policy_played(seat, url, model, expected):
    assert SEATS.trace_columns(played(seat, url, model), POLICY, ORIGIN) == expected


@pytest.mark.parametrize(("url", "model"), [("http://policy/v1", "m"), ("http://rival/v1", "m"), ("http://x/v1", "r")])
def test_a_frozen_seat_that_another_model_played_stops_everything(url, model):
    with pytest.raises(SeatMismatch, match="seat 'rival': it was to be played by 'r' at http://rival/v1"):
        SEATS.trace_columns(played("rival", url, model), POLICY, ORIGIN)


def test_frozen_players_are_found_by_environment_and_seat():
    seats = {"a": {"model": {"url": "http://one"}}, "b": {"max_turns": 1}}
    environments = [
        EnvironmentConfig.model_validate({"name": name, "taskset": {"id": "t"}, "seats": own})
        for name, own in (("x", seats), ("y", {}), ("z", {"a": {"model": {"url": "http://two"}}}))
    ]
    found = frozen_seat_models(environments, lambda teacher: ServedModel(teacher.url, ""))
    assert {name: each.url for name, each in found.items()} == {
        seat_model_name("x", "seats.a.model"): "http://one",
        seat_model_name("z", "seats.a.model"): "http://two",
    }
    assert seat_model_name("x", "y/a") != seat_model_name("x/y", "a")


def test_a_request_without_frozen_seats_is_as_it_was():
    own = {"a": {"trainable": False}, "b": {"max_turns": 1}}
    own_section = EnvironmentConfig.model_validate({"name": "x", "taskset": {"id": "t"}, "seats": own})
    assert Seats.of(own_section, {}, {}).untrained == {"a"}
    plain = Seats.of(EnvironmentConfig(name="y", taskset={"id": "t"}), {}, {})
    client = SimpleNamespace(headers={})
    assert add_header(client, plain.requested_players, None) is client

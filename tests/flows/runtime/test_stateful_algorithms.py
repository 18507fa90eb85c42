"""Estimators with state in whole runs: interrupted, resumed and replayed, they credit as if nothing had happened."""

import shutil

import pytest

from configs.errors import ConfigError
from flows.runtime import loop
from flows.runtime.session import record_run
from storage.store import open_store
from tasks.advantage.stage import StateMissing
from tests.fixtures import rehearsal
from tests.fixtures.histories import results
from tests.fixtures.rehearsal import RAE, SOURCE, Rehearsal, made, rehearse, session_for
from tests.fixtures.replays import ask, quarantine, replay

STEPS = RAE["steps"]
DECAY = RAE["algorithm"]["decay"]
CREDIT = ("sample_id", "baseline", "advantage", "advantages", "rl_weights")


@pytest.fixture(scope="module", autouse=True)
def two_seats():
    with pytest.MonkeyPatch.context() as patch:
        rehearsal.play(patch, rollout=rehearsal.in_turns)
        yield


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A store with a recorded run of three steps whose estimator has state."""
    root = tmp_path_factory.mktemp("stateful") / "store"
    rehearse(root, "base", **RAE)
    return root


@pytest.fixture
def copied(origin, tmp_path):
    """A copy of that store."""
    return shutil.copytree(origin, tmp_path / "store")


def credits(store, run="base", table="samples", names=CREDIT):
    """What each step's advantage came to, in chosen columns of a table."""
    return [[{name: row[name] for name in names} for row in rows] for rows in made(store, "advantage", table, run)]


def filters(*others):
    """Return the override by which rollouts are judged by other filters."""
    tables = ", ".join(f'{{type="{name}"}}' for name in ("errored", *others))
    return [f"filtering.filters=[{tables}]"]


def states(store, run="base"):
    return credits(store, run, "estimator_states", ("environment", "example_id", "agent", "values", "num_traces"))


def test_a_run_credits_as_one_trace_after_the_other_says_and_keeps_the_last_state(origin):
    store = open_store(origin)
    baselines = {}
    for step, traces in enumerate(made(store, "rollout", "traces")):
        rows = {row["sample_id"]: row for row in credits(store)[step]}
        for one in traces:
            seat = one["example_id"], one["agent"]
            baselines[seat] = DECAY * baselines.get(seat, 0.0) + (1 - DECAY) * one["reward"]
            assert rows[f"{one['trace_id']}/0"]["advantage"] == pytest.approx(one["reward"] - baselines[seat])
        found = {(row["example_id"], row["agent"]): row["values"] for row in states(store)[step]}
        assert found == {seat: [pytest.approx(value)] for seat, value in baselines.items()}
    assert step == STEPS - 1 and len(baselines) == 24
    assert {row["num_traces"] for row in states(store)[-1]} == {2, 4}


def test_state_is_part_of_the_key(origin):
    first, second, third = results(open_store(origin), "advantage")
    assert [each.inputs.get("advantage") for each in (first, second, third)] == [None, first.key, second.key]


def test_no_state_no_rows(origin):
    store = rehearse(origin, "plain", **RAE | {"algorithm": {"type": "supervised"}})
    for entry in results(store, "advantage", "plain"):
        assert not entry.slices("estimator_states") and "advantage" not in entry.inputs


def test_a_replay_that_credits_the_second_step_anew_credits_the_same(origin):
    session, _ = replay(origin, steps="1:", overrides=filters(), name="anew")
    store = session.context.store
    entry = max(results(store, "advantage", "anew"), key=lambda entry: entry.step)
    assert entry.step == 2 and entry.key not in {each.key for each in store.ledger.entries(run="base")}
    assert credits(store, "anew") == credits(store)[1:]
    assert states(store, "anew") == states(store)[1:]


@pytest.mark.engine
def test_state_with_rollouts_in_quarantine_in_it_is_refused(copied):
    name = quarantine(open_store(copied), step=0, count=1)[0]
    for first in (1, 2):
        with pytest.raises(ConfigError, match=rf"step {first} goes on from holds 1 rollout\(s\) of step 0 .* {name}"):
            ask(copied, from_stage="advantage", steps=f"{first}:")
    assert ask(copied, from_stage="advantage", steps="2:", quarantine=False).steps == 1
    assert ask(copied, steps="2:", overrides=["algorithm.type=supervised"]).steps == 1
    replay(copied, from_stage="filtering", name="without")
    assert ask(copied, run="without", from_stage="advantage", steps="1:").steps == 2


@pytest.mark.parametrize("changed", ["algorithm.decay=0.9", "algorithm.order=pre"])
def test_state_that_other_settings_made_is_refused(origin, changed):
    with pytest.raises(ConfigError, match="goes on from the state after step 0, and run 'base' recorded none under"):
        ask(origin, steps="1:", overrides=[changed])
    assert ask(origin, steps="0:", overrides=[changed]).steps == STEPS


def test_a_replay_from_the_third_step_of_a_run_without_state_is_refused(origin):
    rehearse(origin, "without", **RAE | {"algorithm": {"type": "supervised"}})
    with pytest.raises(ConfigError, match="goes on from the state after step 1, and run 'without' recorded none") as no:
        ask(origin, run="without", steps="2:", overrides=["algorithm.type=rae"])
    assert "Begin at step 0" in str(no.value)
    assert ask(origin, run="without", overrides=["algorithm.type=rae"]).steps == STEPS


class Forgetful(Rehearsal):
    """Hands the state of the step before to no one."""

    def __call__(self, task, step, refs=(), *others, **named):
        given = [ref for ref in refs if task.stage.name != "advantage" or ref.stage != "advantage"]
        return super().__call__(task, step, given, *others, **named)


def test_state_that_is_gone_stops_the_stage(root):
    session = session_for(root, "base", **RAE)
    with record_run(session), pytest.raises(StateMissing, match="the state after step 0, which recorded none"):
        list(loop.train_steps(Forgetful(session), SOURCE))


def test_several_agents_are_refused_under_another_algorithm(root):
    session = session_for(root, "base", **RAE | {"algorithm": {"type": "grpo"}})
    with record_run(session), pytest.raises(ValueError, match="'first' and 'second', and 'grpo' keeps no agents apart"):
        next(loop.train_steps(Rehearsal(session), SOURCE))


def test_rollouts_of_one_agent_are_not_credited_again_under_it(root, monkeypatch):
    rehearsal.play(monkeypatch, rollout=rehearsal.sampled)
    rehearse(root, "base", **RAE | {"algorithm": {"type": "grpo"}})
    with pytest.raises(ConfigError, match=r"algorithm\.type: 'rae' .* trains one \(agent\)"):
        ask(root, overrides=["algorithm.type=rae"])
    assert ask(root, overrides=["algorithm.type=rloo"]).steps == STEPS


def test_a_function_of_ones_own_keeps_its_state_too(root, monkeypatch):
    own = {"type": "custom", "function": "tests.fixtures.masks:remembering", "keeps_state": True}
    rehearsal.play(monkeypatch, rollout=rehearsal.sampled)
    store = rehearse(root, "base", **RAE | {"algorithm": own})
    counts = [sum(row["num_traces"] for row in rows) for rows in states(store)]
    assert counts == [24, 48, 72], "every step goes on from the one before"
    assert max(abs(row["baseline"]) for row in credits(store)[2]) > 0
    entries = results(store, "advantage")
    assert [each.inputs.get("advantage") for each in entries] == [None, *(each.key for each in entries[:-1])]

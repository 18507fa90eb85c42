"""Forks: runs that go on from a recorded step, with what is equal to the recorded run shared."""

from dataclasses import replace

import pytest

from configs.errors import ConfigError
from flows.runtime import loop, maintenance, resolve_run
from flows.runtime.resolve_run import find_policy, requested_config
from flows.runtime.session import record_run
from tests.fixtures import evaluations, rehearsal

EVALUATED = {"evaluation": {"every": 1, "num_examples": evaluations.HELD_OUT}}


@pytest.fixture
def base(root):
    """The store of a recorded run of three steps, which were evaluated."""
    return evaluations.train(root, "base", evaluations.Sampler(), steps=3, **EVALUATED)[0].context.store


def fork_session(root, name, **changes):
    """Return the session of a fork from step 1 of the recorded run."""
    session = rehearsal.session_for(root, name, fork="base:1", steps=4, **changes)
    session.source = replace(rehearsal.SOURCE, policy=find_policy(session.context.store, "base:1"))
    return session


def test_forks_have_the_recorded_examples_seeds_and_rollouts_until_they_differ(base, root):
    for name, changes, evaluated in (
        ("same", {}, [4]),
        ("other", {"training": {"learning_rate": 1e-3}}, [2, 3, 4]),
    ):
        sampler, session = evaluations.Sampler(), fork_session(root, name, **changes, **EVALUATED)
        with evaluations.played(sampler), record_run(session):
            outcome = loop.loop_train(session)
        assert [entry["version"] for entry in outcome["evaluations"]] == [1, 2, 3, 4]
        assert sampler.evaluated == evaluated, "others were recorded"
        assert base.runs.last(name).parent_run == "base"
    for stage, shared in {"assignment": [1, 2, 3], "rollout": [1], "training": []}.items():
        rows = [base.ledger.entries(run=run, stage=stage) for run in ("base", "same", "other")]
        recorded, same, other = ({entry.step: entry.key for entry in of_run} for of_run in rows)
        assert [same[step] for step in (1, 2)] == [recorded[step] for step in (1, 2)]
        assert [step for step in (1, 2, 3) if same[step] == other[step]] == shared


def test_a_fork_that_samples_ahead_begins_with_the_recorded_policy(base, root):
    session = fork_session(root, "ahead", rollout={"max_off_policy_steps": 1})
    policies = [finished.policy.key for finished in loop.train_steps(rehearsal.Rehearsal(session), session.source)]
    first = session.source.policy.key
    sampled_by = {entry.step: entry.inputs["policy"] for entry in base.ledger.entries(run="ahead", stage="rollout")}
    assert sampled_by == {1: first, 2: first, 3: policies[0]} and len(policies) == 3


def test_a_fork_needs_the_run_that_it_goes_on_from_until_it_has_finished(base, root):
    session = fork_session(root, "fork")
    with record_run(session):
        next(loop.train_steps(rehearsal.Rehearsal(session), session.source))
    assert {run: need.run for run, need in maintenance.needs_of(base).items()} == {"base": "", "fork": "base"}


def test_a_fork_takes_settings_that_the_recorded_config_has_and_the_default_one_has_not(root, monkeypatch):
    algorithm = {"type": "dr_grpo", "length_normaliser": 64}
    fits = {"engine": {"max_model_len": 64}, "rollout": {"max_tokens": 8}}
    evaluations.train(root, "base", evaluations.Sampler(), steps=2, algorithm=algorithm, **fits)
    requested = []

    def stop(store, config):
        requested.append(config)
        raise ValueError("stopped")

    monkeypatch.setattr(resolve_run, "with_stored_weights", stop)
    with pytest.raises(ValueError, match="stopped"):
        resolve_run.resolve_run("train", (), ["fork=base:1", "algorithm.length_normaliser=32"], store=str(root))
    assert requested[0].algorithm.length_normaliser == 32 and requested[0].fork == "base:1"
    with pytest.raises(ConfigError, match="length_normaliser: not a key"):
        resolve_run.resolve_run("train", (), ["algorithm.length_normaliser=32"], store=str(root))


def test_seats_beside_an_adapter_are_refused_in_a_fork_of_whole_weights(base, root):
    fits = ["engine.max_model_len=64", "rollout.max_tokens=8", "steps=4"]
    overrides = ["fork=base:1", *fits, "training.lora={}", "environments.0.seats.other.model.base=true"]
    with pytest.raises(ConfigError, match="fork: base:1 has whole weights, and seats"):
        resolve_run.resolve_run("train", (), overrides, store=str(root))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["fork=base"], "fork: 'base'.* RUN:STEP"),
        (["fork=base:1", "algorithm.type=rae"], "fork: base:1 names a policy"),
    ],
)
def test_what_cannot_be_a_fork_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        requested_config("train", ["demo"], overrides, {})

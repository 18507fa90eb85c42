"""Evaluate: a policy on held-out examples, one request for each rollout."""

from dataclasses import asdict
from typing import Any

from prefect import flow

from flows import pipeline
from flows.cancellation import cancellable
from flows.doing import Worker
from flows.session import Session, sampling_for_evaluation, session_for
from tasks.evaluation import estimates
from tasks.stage import Policy


@flow(name="evaluate", flow_run_name="evaluate-{name}", persist_result=False, validate_parameters=False)
@cancellable
def evaluate(
    files: list[str] | None = None,
    overrides: list[str] | None = None,
    name: str = "",
    store: str = "",
    seed: int | None = None,
    policy: str = "",
) -> dict:
    """Score a policy on held-out examples with avg@k and pass@k; what is already sampled is not sampled again.

    Args:
        files: presets or TOML files, from left to right.
        overrides: dotted settings such as evaluation.num_examples=200.
        name: name of the run; a run of that name is resumed.
        store: root of the store.
        seed: seed of the sampling.
        policy: a run's name for its last policy, run:version for an earlier one; empty takes model.path.
    """
    given = {"name": name, "store": store, "seed": seed, "evaluation.policy": policy}
    with session_for("evaluate", files, overrides, **given) as session:
        return run(session)


def run(session: Session) -> dict[str, Any]:
    """Score the policy that `session` names, or else its model, and tell the watchers."""
    policy = session.policy or pipeline.first_policy(Worker(session), session.source)
    found = {"policy_key": policy.key, "version": policy.version, "scores": scores(session, policy)}
    session.tell("evaluation", **found)
    return found


def scores(session: Session, policy: Policy) -> list[dict[str, Any]]:
    """Sample the held-out examples with `policy`; return one estimate per environment as plain values."""
    place = sampling_for_evaluation(session.place)
    traces = pipeline.attempts(Worker(session, place), policy)
    settings = place.config.evaluation
    return [asdict(each) for each in estimates(place.table("traces", (traces,)), settings.pass_at)]

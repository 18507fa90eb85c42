"""Evaluate: a policy on held-out examples, one request for each rollout."""

from typing import Any

from prefect import flow

from flows.cancellation import cancellable
from flows.session import session_for
from flows.walks import walk_evaluate


@flow(name="evaluate", flow_run_name="evaluate-{name}", persist_result=False, validate_parameters=False)
@cancellable
def evaluate(
    files: list[str] | None = None,
    overrides: list[str] | None = None,
    name: str = "",
    store: str = "",
    seed: int | None = None,
    policy: str = "",
) -> dict[str, Any]:
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
        return walk_evaluate(session)

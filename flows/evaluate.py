"""Evaluate: a policy on held-out examples, one request for each rollout."""

from collections.abc import Sequence
from typing import Any

from prefect.states import Completed

from configs.store import default_store
from flows.orchestration.run_flow import run_flow, run_name
from flows.queries.store_reader import recorded_config
from flows.runtime.entry import FileParameters, session_for
from flows.runtime.loop import loop_evaluate
from flows.runtime.resolve_run import newest_policy
from storage.store import open_store


@run_flow("evaluate")
def evaluate(
    name: str = "",
    policy: str = "",
    presets: Sequence[str] = (),
    model: str = "",
    seed: int | None = None,
    overrides: Sequence[str] = (),
    advanced: FileParameters | None = None,
) -> Any:
    """Score a policy on held-out examples with avg@k and pass@k; what is already sampled is not sampled again.

    Args:
        name: name of the run in the store; a run of that name goes on where it stopped. Empty makes one.
        policy: a run's name for its last policy, run:version for an earlier one, `latest` for the newest of the store.
        presets: presets such as demo or qwen3_gpu, later ones over earlier ones.
        model: weights to score where no policy is named: a directory or hub id.
        seed: seed of the sampling: the same seed samples nothing twice; None draws one.
        overrides: dotted settings such as evaluation.num_examples=200, or evaluation.external.url for another model.
        advanced: what is rarely set: files of settings, and another store.
    """
    rare = FileParameters.of(advanced)
    if policy == "latest":
        store = open_store(rare.store or default_store())
        # A retry scores the policy that its first attempt began with, not one that was made since.
        recorded = None if name else recorded_config(store, run_name("evaluate"))
        policy = recorded.evaluation.policy if recorded else newest_policy(store)
        if not policy:
            # No failure: a schedule may well come before the first policy.
            return Completed(message="nothing to evaluate: no run of the store has made a policy yet", data={})
    given = {"name": name, "store": rare.store, "seed": seed, "evaluation.policy": policy, "model.path": model}
    with session_for("evaluate", [*presets, *rare.files], overrides, **given) as session:
        return loop_evaluate(session)

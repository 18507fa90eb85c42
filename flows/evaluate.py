"""Evaluate: a policy on held-out examples, one request for each rollout."""

from collections.abc import Sequence
from typing import Any

from prefect import flow

from configs.store import default_store
from flows.orchestration.states import OF_A_RUN, needs_api, reports_its_end
from flows.runtime.entry import flow_run_name, instead, session_for
from flows.runtime.loops import loop_evaluate
from flows.runtime.prepare import newest_policy
from storage.store import open_store

LATEST = "latest"


@needs_api
@flow(name="evaluate", flow_run_name=flow_run_name("evaluate"), **OF_A_RUN)
@reports_its_end
def evaluate(
    name: str = "",
    policy: str = "",
    presets: Sequence[str] = (),
    files: Sequence[str] = (),
    environment: str = "",
    model: str = "",
    url: str = "",
    url_model: str = "",
    retry_errors: int = 0,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    store: str = "",
) -> Any:
    """Score a policy on held-out examples with avg@k and pass@k; what is already sampled is not sampled again.

    Args:
        name: name of the run in the store; a run of that name goes on where it stopped. Empty makes one.
        policy: a run's name for its last policy, run:version for an earlier one, `latest` for the newest of the store.
        presets: presets such as demo or qwen3_gpu, later ones over earlier ones.
        files: TOML files on the worker, over the presets; later ones over earlier ones.
        environment: id of an installed taskset, in place of the environments of presets and files.
        model: weights to score where no policy is named: a directory or hub id.
        url: address of a chat API of someone else (https://host/v1), evaluated in place of a policy.
        url_model: name of the model at that address.
        retry_errors: times that rollouts which ended with an error are made again; the first ones are kept.
        seed: seed of the sampling: the same seed samples nothing twice; None draws one.
        overrides: dotted settings such as evaluation.num_examples=200.
        store: root of the store: a directory on the worker, or s3://bucket/prefix.
    """
    if policy == LATEST:
        policy = newest_policy(open_store(store or default_store()))
        if not policy:
            from prefect.states import Completed

            # No failure: a schedule may well come before the first policy.
            return Completed(message="nothing to evaluate: no run of the store has made a policy yet", data={})
    given = {"name": name, "store": store, "seed": seed, "evaluation.policy": policy, "model.path": model}
    given |= {"evaluation.external.url": url, "evaluation.external.model": url_model}
    given |= {"evaluation.retry_errors": retry_errors or None}
    overrides = [*instead(environment), *overrides]
    with session_for("evaluate", [*presets, *files], overrides, **given) as session:
        return loop_evaluate(session)

"""Recovery: how a learner gets back to a policy whose optimizer state was not saved."""

from typing import Any

import pyarrow as pa

from tasks.stage import Place, Policy


class WeightsDiffer(ValueError):
    """Training recorded batches again gave other weights than the recorded ones."""


def policy_row(place: Place, policy_key: str) -> dict[str, Any]:
    """Return the policy's row of the policies table."""
    entry = place.find(policy_key)
    assert entry is not None, f"policy {policy_key} is referred to but not in the ledger"
    return dict(place.store.read(entry.slices("policies")).to_pylist()[0])


def ancestry(place: Place, policy: Policy) -> list[dict[str, Any]]:
    """Return the rows of the policies from the last one that can be loaded whole to `policy`, oldest first.

    A policy can be loaded whole when its optimizer state was saved, or when it has no parent and so no state.
    """
    way = [policy_row(place, policy.key)]
    while way[0]["parent_key"] is not None and not way[0]["has_optimizer"]:
        way.insert(0, policy_row(place, way[0]["parent_key"]))
    return way


def recorded_batches(place: Place, policy_key: str) -> tuple[int, pa.Table]:
    """Return the step and the batches that made a policy."""
    training = place.find(policy_key)
    assert training is not None, f"policy {policy_key} is referred to but not in the ledger"
    packing = place.find(training.inputs["packing"])
    assert packing is not None, f"training {policy_key} names batches that are not in the ledger"
    return training.step, place.store.read(packing.slices("batches"))


def check_same_weights(row: dict[str, Any], weights_sha256: str) -> None:
    """Raise WeightsDiffer unless `weights_sha256` is that of the policy's row."""
    if row["weights_sha256"] != weights_sha256:
        raise WeightsDiffer(
            f"policy {row['policy_key']} (version {row['version']}): training its recorded batches again gave weights "
            f"{weights_sha256[:12]}, recorded are {row['weights_sha256'][:12]}. The recorded weights and all tables "
            f"are safe; the optimizer state between them is not to be had on this machine with this torch. "
            f"Resume where the run was trained, or branch from this policy with a fresh optimizer (model.path)."
        )

"""Keys that configs written for earlier layouts hold: those still understood, and those that are gone."""

import warnings
from collections.abc import Mapping
from typing import Any

REMOVED = {
    "async_level": "rollout.max_off_policy_steps bounds how old a rollout may be, 0 or 1",
    "max_async_level": "rollout.max_off_policy_steps bounds how old a rollout may be, 0 or 1",
    "max_steps": "it is `steps`",
    "environments.*.args": "settings of an environment nest under `taskset` and `harness`",
    "environments.*.id": "the package is named by `taskset.id`",
    "training.loss_type": "it is `training.loss.type`",
    "assignment.batch_size": "it is `assignment.groups_per_step` times `assignment.group_size`",
    "engine.port": "the operating system chooses; `engine.url` names an engine that someone else runs",
}
"""What became of each, by dotted key; `*` stands for the place in a list."""


def translate(tree: dict[str, Any]) -> None:
    """Turn old keys that are still understood into those of today, in place, with a warning for each.

    `num_workers` of an environment: a number is a static pool of that many, "auto" an elastic one; a pool that is given
    wins over it.
    """
    environments = tree.get("environments")
    for index, environment in enumerate(environments if isinstance(environments, list) else []):
        if isinstance(environment, dict) and "num_workers" in environment:
            _translate_num_workers(environment, f"environments.{index}")
    _translate_advantage(tree)


def recorded(tree: dict[str, Any]) -> None:
    """Turn a config that was recorded earlier into the layout of today, in place; nobody can rewrite it: no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        translate(tree)


def _translate_advantage(tree: dict[str, Any]) -> None:
    old = tree.pop("advantage", None)
    if not isinstance(old, dict):
        return
    standing = tree.get("algorithm") or {}
    switched = old.get("type", standing.get("type")) != standing.get("type")
    tree["algorithm"] = old if switched else standing | old
    warnings.warn("advantage is deprecated: the section is called algorithm", FutureWarning, stacklevel=4)


def _translate_num_workers(environment: dict[str, Any], where: str) -> None:
    workers = environment.pop("num_workers")
    pool: Mapping[str, Any] = {"type": "elastic"} if workers == "auto" else {"type": "static", "num_workers": workers}
    environment.setdefault("pool", dict(pool))
    warnings.warn(
        f"{where}.num_workers is deprecated: write {where}.pool = {environment['pool']}", FutureWarning, stacklevel=4
    )


def removed(dotted: str) -> str | None:
    """Return what became of a key that is gone, or None where there never was one of that name."""
    pattern = ".".join("*" if part.isdecimal() else part for part in dotted.split("."))
    return REMOVED.get(pattern)

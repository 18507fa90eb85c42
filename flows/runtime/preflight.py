"""Preflight: what would make a run fail later and can be known before anything is started for it."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from configs.checks.teachers import only_teachers_sample, policy_scores
from configs.run import RunConfig
from flows.runtime.prepare import nothing_started
from flows.services.teachers import asked_teachers
from storage.errors import NoSpace
from storage.store import Store
from tasks.gate.stage import require_rule
from tasks.runtime.stage import Ref
from tasks.stages import services_of

if TYPE_CHECKING:
    from flows.runtime.session import Session

MIB = 1024**2
LEAST_FREE = 16 * MIB
"""Room for logs and for tables without rows to speak of."""


def needs(missing: Sequence[Ref], config: RunConfig) -> list[str]:
    """Return the services that the missing work needs, by their keywords, in the order of the work."""
    unneeded = set[str]()
    if not any(True for _ in asked_teachers(config)):
        unneeded.add("teachers")
    if not _asks_policy(config, {piece.stage for piece in missing}):
        unneeded.add("engine")
    asked = dict.fromkeys(need for piece in missing for need in services_of(piece.stage))
    return [need for need in asked if need not in unneeded]


def _asks_policy(config: RunConfig, stages: set[str]) -> bool:
    """Tell whether a policy samples or scores anything: not where teachers do, unless it is evaluated too."""
    if config.external:
        return False
    evaluated = config.kind == "evaluate" or (config.kind == "train" and config.evaluation.evaluates_training)
    samples = "rollout" in stages and (evaluated or not only_teachers_sample(config))
    return samples or ("reference" in stages and policy_scores(config))


def preflight(session: "Session", missing: Sequence[Ref]) -> None:
    """Make sure that the missing work can begin: a gate's rule, room on the disk, services, environments that load.

    Raises ConfigError, NoSpace, ServiceFailed or EnvironmentUnavailable; nothing was started then.
    """
    stages = {piece.stage for piece in missing}
    with nothing_started():
        require_gate(session.config)
        makes_weights = bool(stages & {"training", "policy_import"})
        require_space(session.context.store, Path(session.source.weights) if makes_weights else None)
        for service in session.needed(missing):
            service.reach()
        if "examples" in stages and session.config.kind != "sft":
            session.environments.examples()


def require_gate(config: RunConfig) -> None:
    """Raise ConfigError where the gate's rule is no condition in SQL over the figures of a batch."""
    if config.gate.type == "rule":
        require_rule(config.gate.rule)


def require_space(store: Store, weights: Path | None) -> None:
    """Raise NoSpace where not even one more policy of the size of `weights` has room on the store's disk."""
    if store.root.directory is None:
        return
    size = sum(file.stat().st_size for file in weights.glob("*.safetensors")) if weights else 0
    needed, free = size + LEAST_FREE, shutil.disk_usage(store.root.directory).free
    if free < needed:
        raise NoSpace(
            f"the disk is full: {free / MIB:.0f} MiB are free, the next step alone needs {needed / MIB:.0f}",
            store.root.address,
            "nothing was started; what is in the store stays as it is",
            "make room there, or take a store on another disk (--store), and run the same again",
        )

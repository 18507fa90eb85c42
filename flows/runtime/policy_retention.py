"""Keeps the weights of a run's policies within bounds while it is at work, and says how much disk they will take."""

import math
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from configs.run import RunConfig
from flows.reporting.formats import size
from storage.errors import NoSpace
from storage.maintenance.plan import PolicyRetention
from storage.store import Store
from tasks.inference.engine.weights_view import read_header, weight_files
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy

MIN_FREE_BYTES = 16 << 20
"""For tables, which are small beside weights."""
BYTES = {"float32": (4, 8), "bfloat16": (2, 12)}
"""By `training.policy_dtype`, bytes a parameter of a policy's weights, and of what is saved beside them: the two
moments of Adam and, where policies are rounded, the float32 weights."""


class WeightRetention:
    """Removes the weights of a run's earlier policies after each step, as `training.keep_weights` says.

    The first policy stays, the newest ones, those that the setting names, the newest with optimizer state, from which a
    resumed run goes on, and whatever another run used.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._present: dict[int, str] = {}
        """Keys of policies by version, but for the first one, whose weights may be there."""

    def note(self, policy: Policy, needed: Collection[str] = ()) -> list[str]:
        """Add the newest policy; return the keys of those whose weights were removed, none of them in `needed`."""
        config, store = self._context.config, self._context.store
        self._present[policy.version] = policy.key
        unneeded = self._present.keys() - kept_versions(config, self._present)
        if not unneeded:
            return []
        kept, run = {*needed}, self._context.run
        kept |= {key for version in unneeded if store.ledger.users(key := self._present[version]) - {run}}
        removed = {version for version in unneeded if self._present[version] not in kept}
        # What a resumed run would go on from must be in the ledger before anything older goes.
        self._context.flush()
        keys = [self._present.pop(version) for version in sorted(removed)]
        for key in keys:
            store.policies.remove(key, f"`training.keep_weights = {config.training.keep_weights!r}` of its run")
        return keys


def kept_versions(config: RunConfig, versions: Iterable[int]) -> set[int]:
    """Return which of a run's policies keep their weights when these versions are there, the newest just made."""
    retention, order = PolicyRetention.parse(config.training.keep_weights), sorted(versions)
    # The policy that samples may be older than the newest by as many steps as the run is off-policy.
    lag = max((player.earlier or 0 for player in config.beside_policy.values()), default=0)
    newest = order[-max(retention.last, config.rollout.max_off_policy_steps + lag + 1) :]
    with_state = [version for version in order if version % config.training.save_optimizer_every == 0][-1:]
    return {*newest, *with_state, *filter(retention.keeps, order)}


def most_bytes(config: RunConfig, num_parameters: int) -> int:
    """Return the most that the weights of a run's policies take at one time, one in the making among them.

    The first policy is left out: it has the precision of the files that it comes from.
    Every policy is taken for whole weights, with two moments where optimizer state is saved.
    """
    weights, state = BYTES[config.training.policy_dtype]
    most, kept = 0, set[int]()
    for version in range(1, config.steps + 1):
        kept.add(version)
        num_states = sum(saved % config.training.save_optimizer_every == 0 for saved in kept)
        most = max(most, num_parameters * (weights * len(kept) + state * num_states))
        kept = kept_versions(config, kept)
    return most


def require_space(store: Store, config: RunConfig, weights: Path | None) -> None:
    """Raise NoSpace where the run's policies, which begin with those in `weights`, have no room on the store's disk.

    None asks for little more than nothing. Of weights that are there already, nothing is known here: a resumed run is
    asked for one policy more.
    """
    if store.root.directory is None:
        return
    # Quantised ones are imported in bfloat16.
    needed = MIN_FREE_BYTES + (max(file_bytes(weights), 2 * num_parameters(weights)) if weights else 0)
    if weights and config.training.lora is None and not store.ledger.entries(run=config.name):
        needed += most_bytes(config, num_parameters(weights))
    if (free := shutil.disk_usage(store.root.directory).free) < needed:
        raise NoSpace(
            f"the disk has no room for the weights of this run: {size(free)} are free, it will need up to "
            f"{size(needed)} (training.keep_weights is {config.training.keep_weights!r}, optimizer state is saved "
            f"every {config.training.save_optimizer_every} steps)",
            store.root.address,
            "nothing was started; what is in the store stays as it is",
            "set training.keep_weights=last:3, make room there, or take a store on another disk (--store)",
        )


def file_bytes(directory: Path) -> int:
    """Return the size of the safetensors files of a model."""
    return sum(file.stat().st_size for file in weight_files(directory))


def num_parameters(directory: Path) -> int:
    """Return how many values the safetensors files of a model hold; of blocks in mxfp4 two a byte."""
    entries = [entry for path in weight_files(directory) for entry in read_header(path)[0].items()]
    return sum(math.prod(entry["shape"]) * (2 if name.endswith("_blocks") else 1) for name, entry in entries)

"""Finds policies of a store by name (RUN, RUN:VERSION), and their weights."""

from pathlib import Path

from configs.run import RunConfig
from configs.training import LoraConfig
from storage.store import Store
from tasks.runtime.stage import Policy


class PolicyUnknown(ValueError):
    """No policy of the store goes by that name."""


def find_policy(store: Store, name: str) -> Policy | None:
    """Return the policy that `name` names: RUN for a run's last one, RUN:VERSION for an earlier one; None for none.

    Raises PolicyUnknown when the run has no such policy.
    """
    if not name:
        return None
    run, _, wanted = name.partition(":")
    imported = [entry.key for entry in store.ledger.entries(run=run, stage="policy_import")]
    made = dict(enumerate(imported[-1:]))
    made |= {entry.step + 1: entry.key for entry in store.ledger.entries(run=run, stage="training")}
    number = int(wanted) if wanted.isdecimal() else max(made, default=0)
    if number not in made or (wanted and not wanted.isdecimal()):
        has = f"has the versions {', '.join(map(str, sorted(made)))}" if made else "has made no policy"
        runs = f"; the last runs in {store.root.address} are: {', '.join(store.runs.names()[-5:]) or 'none'}"
        raise PolicyUnknown(
            f"there is no policy {name!r}: run {run!r} {has}{'' if made else runs}. Name one as RUN or RUN:VERSION"
        )
    return Policy(made[number], number)


def whole_weights(store: Store, policy_key: str) -> Path:
    """Return the directory of a policy's weights; of an adapter, those of the policy that it is laid over."""
    return store.policies.directory(next(iter(store.policies.adapter_bases([policy_key])), policy_key))


def with_weights(store: Store, config: RunConfig, policy_key: str) -> RunConfig:
    """Let `model.path` name the weights of a policy in the store, and `training.lora` what adapter it is, if any."""
    model = config.model.model_copy(update={"path": str(whole_weights(store, policy_key))})
    made = store.ledger.find(policy_key)
    adapter = made.section.get("training", {}).get("lora") if made else None
    lora = LoraConfig(**adapter) if adapter else config.training.lora
    return config.model_copy(update={"model": model, "training": config.training.model_copy(update={"lora": lora})})


def newest_policy(store: Store) -> str:
    """Return the newest policy that training has made, as RUN:VERSION; empty where there is none."""
    entries = [entry for run in store.runs.names() for entry in store.ledger.entries(run=run, stage="training")]
    newest = max(entries, key=lambda entry: entry.finished_at, default=None)
    return f"{newest.run}:{newest.step + 1}" if newest else ""

"""Which weights a flow starts from, where its parameters name them by what they are and not by a directory."""

from configs.load import load
from configs.run import RunConfig
from storage.store import Store, open_store

DEMO = "demo"
WARM_UP = "demo-warm-up"


def weights_of(model: str, store: str) -> str:
    """Return the directory or hub id of the weights that `model` names; `demo` is made in the store where need be."""
    return demo_policy(store or RunConfig().store) if model == DEMO else model


def demo_policy(root: str) -> str:
    """Return the weights that the demo starts from: a small model, warmed up on demonstrations by the flow `sft`.

    The first call in a store takes the minutes of the warm-up, in a run of its own that `stagecoach demo` has too.
    """
    from flows.demo_recipes import SEED
    from flows.demo_sources import build, sources_directory, warmed_up
    from flows.sft import sft

    store = open_store(root)  # before anything else lies there: a store is made in an empty directory
    if not (key := _last_policy(store)):
        sources = build(sources_directory(root))
        sft(
            name=WARM_UP,
            presets=["sft_demo"],
            model=str(sources.model),
            data=str(sources.demonstrations),
            seed=SEED,
            store=root,
        )
        key = _last_policy(store)
    return str(warmed_up(root, key))


def _last_policy(store: Store) -> str:
    """Return the key of the warm-up's last policy; empty where it is not finished."""
    trained = {entry.step: entry.key for entry in store.ledger.entries(run=WARM_UP, stage="training")}
    return trained.get(load(["sft_demo"]).steps - 1, "")


def newest_policy(store: Store) -> str:
    """Return the newest policy that training has made, as RUN:VERSION; empty where there is none."""
    entries = [entry for run in store.runs.names() for entry in store.ledger.entries(run=run, stage="training")]
    newest = max(entries, key=lambda entry: entry.finished_at, default=None)
    return f"{newest.run}:{newest.step + 1}" if newest else ""

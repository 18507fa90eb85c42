"""Maintain: compact the tables of a store and remove what no ledger row names."""

from configs.run import RunConfig
from storage.maintenance import maintain
from storage.store import open_store


def main(store: str = "") -> int:
    """Maintain a store and print what was done; return the exit status."""
    done = maintain(open_store(store or RunConfig().store))
    print(done)
    return 0

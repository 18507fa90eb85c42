"""Maintains a store as a Prefect flow, for a schedule; `stagecoach maintain` and `gc` do the same without."""

from typing import Any

from pydantic import Field

from configs.store import default_store
from flows.orchestration.run_flow import run_flow
from flows.runtime import maintenance
from flows.runtime.entry import StoreParameters
from storage.maintenance.sweep import RemovalReport
from storage.store import open_store


class MaintenanceParameters(StoreParameters):
    """Rare parameters of maintenance."""

    retention_hours: float = Field(
        168, description="age from which on files that nothing names are deleted; others may use younger ones"
    )
    retain: list[str] = Field(
        [], description="how long tables that no later stage reads keep rows, such as token_statistics=30d"
    )
    policies: str = Field("all", description="which weights runs keep: all, last, or every:N (each n-th and the last)")
    trust_ledger: bool = Field(False, description="delete also where runs or files contradict the ledger")


@run_flow("maintain")
def maintain(
    keep: list[str] | None = None,
    keep_last: int = 0,
    dry_run: bool = False,
    advanced: MaintenanceParameters | None = None,
) -> dict[str, Any]:
    """Compact the tables of a store and delete what nobody needs; with runs to keep, remove all others.

    Args:
        keep: runs to keep, with all that they reach; every other finished run is removed. Empty removes no run.
        keep_last: keep that many newest runs as well; with this alone, every older finished run is removed.
        dry_run: change nothing, only say what would be done.
        advanced: what is rarely set: how long files and rows are kept, which weights, another store.
    """
    rare = MaintenanceParameters.of(advanced)
    root = open_store(rare.store or default_store())
    going = maintenance.choose_removal(root, keep or [], keep_last, (), (), rare.policies, rare.trust_ledger)
    removed = RemovalReport() if dry_run else maintenance.remove_planned(root, going)
    done = maintenance.maintain_tables(root, rare.retention_hours, rare.retain, False, dry_run, rare.trust_ledger)
    return {"gc": maintenance.describe_removal(going, removed), **done}

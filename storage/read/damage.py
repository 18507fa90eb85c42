"""Names the damaged files behind an error: libraries say that some file is no Parquet, and not which one."""

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from storage.errors import StoreError, StoreUnavailable, border, is_foreign
from storage.schemas.stage_tables import TABLES
from storage.schemas.system_tables import SYSTEM_TABLES
from storage.store import Store

SYSTEM = tuple(table.name for table in SYSTEM_TABLES)
MOST_NAMED = 5


def damaged_files(store: Store, tables: Collection[str] = tuple(TABLES)) -> list[str]:
    """Read every file that some tables hold; return, for each that is damaged, its address and what is wrong with it.

    Page checksums are compared, and not the digests of the ledger: `repair --deep` does that.
    """
    found = []
    for name in [name for name in store.root.names("tables") if name in tables]:
        table = store.table(name)
        for file in table.active_files():
            try:
                table.read(file.path)
            except StoreError as error:
                found.append(f"{table.file_address(file.path)}: {error.what}")
    return found


def damage_behind(error: BaseException, store: Store) -> StoreError | None:
    """The error that names the damaged files behind another one; None where no file is damaged.

    Warns first that it looks for damage: of a large store that takes long.
    """
    warnings.warn(
        f"{type(error).__name__} came of reading {store.root.address}: looking through all of its files for damage. "
        "Nothing is changed, and Ctrl-C ends it",
        stacklevel=2,
    )
    if not (damaged := damaged_files(store)):
        return None
    more = [f"and {len(damaged) - MOST_NAMED} more"] if len(damaged) > MOST_NAMED else []
    what = "\n".join(["files of the store are damaged:", *damaged[:MOST_NAMED], *more])
    advice = "put each of them back from a copy, or run `stagecoach repair --deep`: it says what can be done again"
    found = StoreUnavailable(what, store.root.address, "every other file; the store was only read", advice)
    found.__cause__ = error
    return found


@contextmanager
def reading(store: Store) -> Iterator[None]:
    """Convert what libraries raise over the tables into a StoreUnavailable that names the damaged files."""
    try:
        with border("reading the tables", store.root.address):
            yield
    except StoreError as error:
        # One of our own names its file.
        if error.__cause__ is None or not is_foreign(error.__cause__) or ".parquet" in error.where:
            raise
        raise damage_behind(error, store) or error from error.__cause__

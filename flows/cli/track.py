"""The command track: sends the metrics of a recorded run to W&B or TensorBoard."""

from typing import Annotated, Literal

from configs.load import override
from configs.store import default_store
from flows.cli.arguments import RunItems, StoreOption, UsageError, one_run, option, split_items
from flows.queries.store_reader import StoreReader, recorded_run
from flows.queries.tracked_rows import recorded_rows
from flows.reporting.tracking import open_sink
from flows.reporting.tracking import track as send_rows
from flows.runtime.session import log_directory

SECTION = "tracking."


def track(
    *items: RunItems,
    to: Annotated[Literal["wandb", "tensorboard"], option("where the figures go")],
    store: StoreOption = "",
) -> int:
    """Send the metrics of a recorded run; only settings of the section tracking may change.

    Raises ConfigError for an unknown run, LayoutError without a store, TrackingError.
    """
    runs, overrides = split_items(items)
    if others := [each for each in overrides if not each.startswith(SECTION)]:
        raise UsageError(f"track changes settings of {SECTION[:-1]} alone, not {others[0]}: the run is recorded")
    library = StoreReader.at(store or default_store())
    run, recorded = recorded_run(library.store, one_run(runs))
    # The store is where it is now: it may have been moved since.
    here = {"store": library.store.root.address}
    config = override(recorded, [f"tracking.type={to}", *overrides]).model_copy(update=here)
    with open_sink(config, log_directory(config), known=True) as sink:
        assert sink is not None, "one of the two kinds was asked for"
        count = send_rows(recorded_rows(library, run, config), sink)
        where = sink.where
    print(f"{count} rows of {run}. {where}")
    return 0

"""The command track: sends the metrics of a recorded run to W&B or TensorBoard."""

from typing import Annotated, Literal

from flows.cli.arguments import RunItems, StoreOption, UsageError, one_run, option, split_items, stored_run


def track(
    *items: RunItems,
    to: Annotated[Literal["wandb", "tensorboard"], option("where the figures go")],
    store: StoreOption = "",
) -> int:
    """Send the metrics of a recorded run; only settings of the section tracking may change.

    Raises ConfigError for an unknown run, LayoutError without a store, TrackingError.
    """
    from configs.load import override
    from flows.queries.tracked_rows import recorded_rows
    from flows.reporting import tracking
    from flows.runtime.session import log_directory

    runs, overrides = split_items(items)
    if others := [text for text in overrides if not text.startswith("tracking.")]:
        raise UsageError(f"track changes settings of tracking alone, not {others[0]}: the run is recorded")
    reader, run, recorded = stored_run(store, one_run(runs))
    # The store is where it is now: it may have been moved since.
    address = {"store": reader.store.root.address}
    config = override(recorded, [f"tracking.type={to}", *overrides]).model_copy(update=address)
    with tracking.open_sink(config, log_directory(config)) as sink:
        assert sink is not None, "a sink of one of the two kinds"
        count = tracking.track(recorded_rows(reader, run, config), sink)
    print(f"{count} rows of {run}. {sink.where}")
    return 0

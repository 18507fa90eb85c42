"""The command view: pages of runs in a browser, or one page as a file."""

from typing import Annotated

from flows.cli.arguments import Force, Port, StoreOption, UsageError, option


def view(
    *,
    run: Annotated[str, option("open this run, `latest` for the newest; without it, the list of runs", "RUN")] = "",
    host: Annotated[str | None, option("address to listen on; only this machine by default")] = None,
    port: Annotated[Port | None, option("port to listen on; by default a free one from 8265 on")] = None,
    browse: Annotated[bool, option("open a browser", name="--open")] = False,
    save: Annotated[tuple[str, str] | None, option("write a page to a file instead", "ADDRESS FILE")] = None,
    force: Force = False,
    store: StoreOption = "",
) -> int:
    """Serve the pages of a store until Ctrl-C, or write one of them. Raises UsageError, LayoutError."""
    if save is None:
        from flows.viewer.serving import main

        return main(store=store, run=run, host="127.0.0.1" if host is None else host, port=port, browse=browse)
    if run or browse or host is not None or port is not None:
        raise UsageError("--save writes one page and starts nothing: it goes without --run, --host, --port and --open")
    from flows.viewer.routes import save as save_page

    return save_page(*save, store=store, force=force)

"""All runs of a store, forks as a tree."""

from flows.viewer.library import Library
from flows.viewer.page import Asked, Page


def page(library: Library, asked: Asked) -> Page:
    """Return the list of runs."""
    runs = [{"run": name} for name in reversed(library.store.runs.names())]
    return Page("runs.html", "Runs", {"store": library.store.root.address, "runs": runs}, live=True)

"""Warming: what the first page of a viewer waits for otherwise, done while nobody has asked for one yet."""

from contextlib import suppress
from threading import Thread

from configs.errors import ConfigError
from flows.viewer.library import Library
from flows.viewer.web.rendering import templates
from storage.errors import StoreError

OFTEN = ("runs.html", "run.html", "step.html", "trace.html")
"""The templates of the pages that are opened first, in their order; the others follow."""


def in_background(library: Library) -> Thread:
    """Begin to warm in a thread that ends with the process, and return it."""
    thread = Thread(target=warm, args=(library,), name="warming", daemon=True)
    thread.start()
    return thread


def warm(library: Library) -> None:
    """Read the ledger and compile every template. What is wrong with a store is left for the first page to say."""
    with suppress(StoreError, ConfigError):
        library.moment()  # under its lock: a page that comes meanwhile waits for this reading and does none of its own
    known = templates()
    for name in dict.fromkeys((*OFTEN, *known.list_templates(extensions=["html"]))):
        known.get_template(name)

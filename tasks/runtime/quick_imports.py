"""Imports without garbage collection: a process that serves or trains a model starts in two thirds of the time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Switch the garbage collector off in this block, and exempt from it for good what was imported.

    Modules make objects by the hundred thousand and next to no garbage, and the collector would go through all of them
    again and again: a third of the time in which an engine starts. For imports alone: what is there when the block ends
    is never looked at again, so that a model in a reference cycle would stay for ever. A collector that somebody
    switched off before stays off.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()

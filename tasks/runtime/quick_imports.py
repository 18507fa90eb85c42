"""Importing much at once, as a process does that serves a model or trains one, in two thirds of the time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Keep the garbage collector out of what is imported in this block, and afterwards out of what was.

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

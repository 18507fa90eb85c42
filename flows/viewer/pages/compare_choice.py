"""Two runs side by side, chosen in a form: the address of `compare`, with the runs in the question."""

from flows.viewer import addresses
from flows.viewer.library import Library
from flows.viewer.page import Asked, BadQuestion, Page
from flows.viewer.pages import compare


def page(library: Library, asked: Asked) -> Page:
    """Return the comparison of run `a` with run `b`. Raises BadQuestion where one of them is not named."""
    a, b = asked.text("a"), asked.text("b")
    if not (a and b):
        raise BadQuestion("choose two runs to compare: one in the column A, another in the column B")
    return compare.page(library, Asked(addresses.compare(a, b), {"a": a, "b": b}))
